"""Small nets of timm, torchvision and transformers: what benchmarks.zoo trains.

Each choice has a label and a function without arguments, which returns a name, a net and a batch for it, or None if there is no
small net. A net of transformers is narrow, and has two layers and random weights.
"""

from contextlib import suppress
from functools import partial

import torch

from benchmarks.models import Logits, from_timm, from_torchvision

BATCH = 16
TOKENS = 128  # of a sequence
MAX_PARAMETERS = 40e6

# What the configurations of transformers have such names for, and what it is in a small net.
SMALL = {
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    64: "head_dim",
    256: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim word_embed_proj_dim",
    512: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size hidden_dim",
    1000: "vocab_size",
}


def parameters_of(create):
    """The number of a net's parameters. It is created on the meta device if possible, without allocating them."""
    try:
        with torch.device("meta"):
            net = create()
    except (NotImplementedError, RuntimeError):  # it computes with what it makes
        net = create()
    return sum(parameter.numel() for parameter in net.parameters())


def of_timm(module):
    """The first small net of a module."""
    import timm

    for name in timm.list_models(module=module):
        if parameters_of(partial(from_timm, name)) <= MAX_PARAMETERS:
            net = from_timm(name)
            return f"timm {name}", net, torch.randn(BATCH, *net.pretrained_cfg["input_size"])
    return None


def of_torchvision(name):
    import torchvision

    weights = torchvision.models.get_model_weights(name).DEFAULT
    if weights.meta["num_params"] > MAX_PARAMETERS:
        return None
    size = weights.transforms().crop_size[0]
    return f"torchvision {name}", from_torchvision(name, weights=None), torch.randn(BATCH, 3, size, size)


def small(config):
    """A configuration of transformers, narrow and of two layers."""
    values = {"use_cache": False}
    for most, names in SMALL.items():
        found = {name: getattr(config, name, None) for name in names.split()}
        values |= {name: min(most, value) for name, value in found.items() if isinstance(value, int)}
    for name in "layer_types", "mlp_layer_types":  # of each layer
        if kinds := getattr(config, name, None):
            values[name] = (list(dict.fromkeys(kinds)) * 2)[:2]
    for name in "pad_token_id", "bos_token_id", "eos_token_id":
        if getattr(config, name, None) is not None:
            values[name] = 0  # within the vocabulary
    for name, value in values.items():
        with suppress(AttributeError, NotImplementedError):  # computed from others
            setattr(config, name, value)
    return config


def of_transformers(model_type, name):
    import transformers

    config = small(transformers.CONFIG_MAPPING[model_type]())
    create = partial(getattr(transformers, name), config)
    if parameters_of(create) > MAX_PARAMETERS:
        return None
    if "ImageClassification" in name:
        size = getattr(config, "image_size", 224)
        batch = torch.randn(BATCH, 3, *((size, size) if isinstance(size, int) else size))
    else:
        batch = torch.randint(1, config.vocab_size, (BATCH, TOKENS))
    return f"transformers {name}", Logits(create()), batch


def choices():
    import timm
    import torchvision
    from transformers.models.auto import modeling_auto

    for module in timm.list_modules():
        yield f"timm {module}", partial(of_timm, module)
    for name in torchvision.models.list_models(module=torchvision.models):
        yield f"torchvision {name}", partial(of_torchvision, name)
    model_types = {}
    for head in "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION":
        names = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
        model_types |= {name: model_type for model_type, name in names.items() if isinstance(name, str)}
    for name, model_type in model_types.items():
        yield f"transformers {name}", partial(of_transformers, model_type, name)
