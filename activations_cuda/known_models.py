"""Models of torchvision, timm and transformers by name, without weights, and inputs for them: for the report's command."""

import difflib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from activations_cuda.memory import require


def _check_known(library, name, known):
    if name not in known:
        close = difflib.get_close_matches(name, known)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"{library} has no image classifier {name}{hint}")


def _of_torchvision(name):
    models, name = require("torchvision").models, name.lower()
    _check_known("torchvision", name, models.list_models(module=models))  # those that classify images
    return partial(models.get_model, name)


def _of_timm(name):
    timm, name = require("timm"), name.lower()
    _check_known("timm", name, [*timm.list_models(), *timm.list_pretrained()])
    return partial(timm.create_model, name)


def _of_transformers(name):
    """Its configuration comes from the Hugging Face Hub or a local folder."""
    transformers = require("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except ImportError:
        raise
    except Exception as error:  # whatever a configuration's checks raise
        raise ValueError(f"transformers can't read a configuration {name}: {error}") from error
    config.use_cache = False  # as in training
    for dropout in "attn_pdrop", "attention_dropout", "attention_probs_dropout_prob":
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)  # with it attention on a CPU saves more, on a GPU it doesn't
    if not config.architectures:
        return partial(transformers.AutoModel.from_config, config)
    model_class = getattr(transformers, config.architectures[0], None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise ValueError(f"transformers has no model {config.architectures[0]}, which the configuration {name} names")
    return partial(model_class._from_config, config)  # in the configuration's dtype


# What creates a model of a name.
LIBRARIES: dict[str, Callable[[str], Callable[[], nn.Module]]] = {
    "torchvision": _of_torchvision,
    "timm": _of_timm,
    "transformers": _of_transformers,
}


def load(spec: str) -> nn.Module:
    """The model that `library:name` names, without weights."""
    library, _, name = spec.partition(":")
    if library.lower() not in LIBRARIES or not name:
        raise ValueError(f"expected torchvision:NAME, timm:NAME or transformers:NAME, got {spec}")
    create = LIBRARIES[library.lower()](name)
    try:
        with torch.device("meta"):
            return create()
    except Exception as error:  # whatever a constructor raises that wants something else
        if "meta" in str(error):  # it computes with values, as torchvision's RegNets do
            with suppress(Exception):
                return create()
        raise ValueError(f"{spec} can't be created on the meta device: {error}") from error


def inputs_of(model: Any, batch: int, size: int, tokens: int) -> Tensor | dict[str, Tensor]:
    """Images, or what a model of transformers takes by its main input's name, on the meta device."""
    images = torch.empty((batch, 3, size, size), device="meta")
    name = getattr(model, "main_input_name", None)
    if name is None:
        return images
    if name == "pixel_values":
        return {name: images}
    if name != "input_ids":
        raise ValueError(f"expected a model of images or tokens, got one of {name}")
    names = [name, "decoder_input_ids"] if model.config.is_encoder_decoder else [name]
    return {name: torch.empty((batch, tokens), dtype=torch.long, device="meta") for name in names}
