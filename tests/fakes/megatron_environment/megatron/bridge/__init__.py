"""Stand-in for megatron-bridge 0.5.0 on the CPU, for models whose projections it joins as Megatron does.

Weights have the names that they have in folders, where each expert has its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

JOINED = {
    r"self_attn\.(?:q|k|v)_proj\.weight$": (
        "self_attention.linear_qkv.weight",
        ("q", "k", "v"),
        "self_attn.{}_proj.weight",
    ),
    r"mlp\.(?:gate|up)_proj\.weight$": ("mlp.linear_fc1.weight", ("gate", "up"), "mlp.{}_proj.weight"),
}
PADDING = 8
"""Words that only make the vocabulary divisible."""


class HFWeightTuple(NamedTuple):
    param_name: str
    weight: torch.Tensor


class Model(nn.Module):
    """Parameters named and joined otherwise than in `transformers`, computed by a model of it."""

    def __init__(self, hf, config, dtype):
        super().__init__()
        self.config, self._hf, self.names = config, [hf], []
        named = dict(hf.named_parameters())
        self.shapes = {name: weight.shape for name, weight in named.items()}
        for name in named:
            if (whole := self._joined(name))[0] not in self.names:
                self.names.append(whole[0])
                value = torch.cat([named[part].detach() for part in whole[1]]).to(dtype)
                self.register_parameter(whole[0].replace(".", "/"), nn.Parameter(value))

    @staticmethod
    def _joined(name):
        """The name of the parameter that a weight is in, and the weights that are in it."""
        for pattern, (whole, kinds, part) in JOINED.items():
            if found := re.search(pattern, name):
                before = name[: found.start()]
                return before.replace("model.", "decoder.") + whole, [before + part.format(kind) for kind in kinds]
        return name.replace("model.", "decoder."), [name]

    def parts(self):
        """Views of the parameters by their names in `transformers`."""
        found = {}
        for name in self.shapes:
            whole, names = self._joined(name)
            parameter = getattr(self, whole.replace(".", "/"))
            sizes = [self.shapes[part][0] for part in names]
            found[name] = parameter.split(sizes)[names.index(name)]
        return found

    def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None):
        assert input_ids.shape == position_ids.shape
        assert input_ids.shape[1] % parallel_state.SIZES["tp"] == 0
        if not parallel_state.is_pipeline_last_stage():
            return None
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        logits = torch.func.functional_call(self._hf[0], self.parts(), (), inputs).logits
        padded = nn.functional.pad(logits, (0, PADDING - logits.shape[-1] % PADDING + PADDING), value=9.0)
        return padded.chunk(parallel_state.SIZES["tp"], -1)[parallel_state.get_tensor_model_parallel_rank()]


class GPTModelProvider:
    """The fields of the real one that may be set; others are an error."""

    tensor_model_parallel_size = pipeline_model_parallel_size = context_parallel_size = expert_model_parallel_size = 1
    expert_tensor_parallel_size = None
    sequence_parallel = variable_seq_lengths = calculate_per_token_loss = bf16 = fp16 = False
    hidden_dropout = attention_dropout = 0.1
    moe_aux_loss_coeff = 0.001
    params_dtype = pipeline_dtype = autocast_dtype = torch.float32
    recompute_granularity = recompute_method = recompute_num_layers = None
    finalize_model_grads_func = None
    made = None

    def __init__(self, hf):
        object.__setattr__(self, "hf", hf)

    def __setattr__(self, name, value):
        if not hasattr(type(self), name):
            raise AttributeError(f"GPTModelProvider has no field {name}")
        object.__setattr__(self, name, value)

    def finalize(self):
        assert self.hidden_dropout == self.attention_dropout == 0.0, "log-probabilities must not be random"
        assert self.moe_aux_loss_coeff == 0.0, "Megatron would add a loss of its own"
        assert self.sequence_parallel == (self.tensor_model_parallel_size > 1), "experts need it together with tp"
        experts = self.tensor_model_parallel_size if self.expert_model_parallel_size == 1 else 1
        assert self.expert_tensor_parallel_size == experts, "ranks along ep have whole experts"
        self.made = "finalized"

    def initialize_model_parallel(self, seed=None, seed_kwargs=None, **model_parallel_kwargs):
        assert self.made == "finalized"
        assert self.context_parallel_size == 1
        sizes = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.expert_model_parallel_size
        parallel_state.initialize(*sizes)
        self.made = "initialized"

    def provide_distributed_model(
        self,
        ddp_config=None,
        model_type=None,
        overlap_param_gather_with_optimizer_step=False,
        fp16=None,
        bf16=None,
        use_megatron_fsdp=False,
        use_torch_fsdp2=False,
        wrap_with_ddp=True,
        data_parallel_random_init=False,
        use_cpu_initialization=False,
        init_model_with_meta_device=None,
        pre_wrap_hook=None,
        post_wrap_hook=None,
        mixed_precision_wrapper=None,
        pg_collection=None,
    ):
        assert self.made == "initialized"
        assert not wrap_with_ddp or ddp_config is not None
        model = Model(self.hf, self, self.params_dtype)
        return [DistributedDataParallel(self, ddp_config, model) if wrap_with_ddp else model]


class AutoBridge:
    def __init__(self, hf):
        self._hf = hf

    @classmethod
    def from_hf_pretrained(cls, path, **kwargs):
        return cls(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **kwargs)
        )

    def to_megatron_provider(self, load_weights=True, hf_path=None):
        assert load_weights
        return GPTModelProvider(self._hf)

    def export_hf_weights(
        self, model, cpu=False, show_progress=True, conversion_tasks=None, merge_adapter_weights=True
    ):
        (chunk,) = model
        for name, weight in getattr(chunk, "module", chunk).parts().items():
            for saved, part in revert_weight_conversion(self._hf, {name: weight}).items():
                yield HFWeightTuple(saved, part)

    def load_hf_weights(self, model, hf_path=None, allowed_mismatched_params=None):
        (chunk,) = model
        source = {}
        for file in Path(hf_path).glob("*.safetensors"):
            source |= load_file(file)
        with torch.no_grad():
            for name, weight in getattr(chunk, "module", chunk).parts().items():
                whole = torch.empty(weight.shape)
                places = revert_weight_conversion(self._hf, {name: torch.arange(weight.numel()).view(weight.shape)})
                for saved, numbers in places.items():
                    whole.view(-1)[numbers] = source[saved]
                weight.copy_(whole)
