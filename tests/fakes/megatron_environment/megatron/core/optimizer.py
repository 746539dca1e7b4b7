from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class OptimizerConfig:
    optimizer: str = "adam"
    lr: float | None = None
    weight_decay: float = 0.01
    bf16: bool = False
    fp16: bool = False
    params_dtype: torch.dtype = torch.float32
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    use_distributed_optimizer: bool = False
    clip_grad: float = 1.0


def get_megatron_optimizer(
    config,
    model_chunks,
    config_overrides=None,
    use_gloo_process_groups=True,
    pg_collection=None,
    dump_param_to_param_group_map=None,
):
    return ChainedOptimizer([_Part(config, [p for chunk in model_chunks for p in chunk.parameters()])])


class _Part:
    """As `FP32Optimizer` or, in bfloat16, `Float16OptimizerWithFloat16Params`."""

    def __init__(self, config, parameters):
        self.config, self.parameters = config, parameters
        for parameter in parameters if config.bf16 else ():
            parameter.main_param = parameter.detach().clone().float()
        masters = self.masters = [getattr(p, "main_param", p) for p in parameters]
        groups = [
            {"params": [p for p in masters if p.ndim != 1], "wd_mult": 1.0},
            {"params": [p for p in masters if p.ndim == 1], "wd_mult": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps
        )

    @staticmethod
    def init_state_fn(opt, config=None):
        for group in opt.param_groups:
            for p in group["params"]:
                if len(opt.state[p]) == 0:
                    opt.state[p]["exp_avg"] = torch.zeros_like(p.data)
                    opt.state[p]["exp_avg_sq"] = torch.zeros_like(p.data)
                    opt.state[p]["step"] = torch.zeros(())


class ChainedOptimizer:
    def __init__(self, chained_optimizers):
        self.chained_optimizers = chained_optimizers
        self.config = chained_optimizers[0].config

    @property
    def param_groups(self):
        return [group for one in self.chained_optimizers for group in one.optimizer.param_groups]

    def prepare_grads(self) -> bool:
        for one in self.chained_optimizers:
            for parameter, master in zip(one.parameters, one.masters, strict=True):
                master.grad = parameter.main_grad.clone()
        return False

    def _gradients(self):
        return [master.grad for one in self.chained_optimizers for master in one.masters]

    def get_grad_norm(self):
        return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in self._gradients()))

    @torch.no_grad()
    def step(self):
        self.prepare_grads()
        norm = self.get_grad_norm()
        scale = self.config.clip_grad / (norm + 1.0e-6)
        for gradient in self._gradients() if scale < 1.0 else ():
            gradient.mul_(scale)
        for one in self.chained_optimizers:
            one.optimizer.step()
            for group in one.optimizer.param_groups:  # Transformer Engine's Adam counts here, and corrects by it
                group["step"] = group.get("step", 0) + 1
                steps = {float(one.optimizer.state[parameter]["step"]) for parameter in group["params"]}
                assert steps <= {group["step"]}, "the optimizer counts other updates than led to its moments"
            for parameter, master in zip(one.parameters, one.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
        return True, norm, None

    def zero_grad(self, set_to_none=True):
        for one in self.chained_optimizers:
            for parameter in (*one.parameters, *one.masters):
                parameter.grad = None
