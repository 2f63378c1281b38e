// This library's ops and PyTorch's, to be called or redispatched from C++.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace fastact {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const std::string& name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("fastact::" + name).c_str(), overload).typed<Signature>();
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find_pytorchs(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), "").typed<Signature>();
}

}  // namespace fastact
