"""The kernels that torch chooses on CUDA, put in the place of the CPU's while a model is traced."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


def use_cuda_kernels(module: nn.Module) -> None:
    """In its forward pass and wherever that is computed again: backward leaves function modes."""
    forward = module.forward

    def with_kernels(*arguments: Any) -> Any:
        with _CudaKernels():
            return forward(*arguments)

    module.forward = with_kernels


class _CudaKernels(TorchFunctionMode):
    """The kernels that torch chooses on CUDA, where they keep other tensors than the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and kwargs["training"] and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # a mask of bytes
        if func is F.rms_norm:
            return _FusedRMSNorm.apply(args[0], kwargs["weight"])
        if func is F.scaled_dot_product_attention:
            dropout, grouped = kwargs["dropout_p"], kwargs["enable_gqa"]
            mask = kwargs.get("attn_mask")
            causal = mask is None
            if args[0].dtype != torch.float32 and causal:
                flash = aten._scaled_dot_product_flash_attention
                return flash(*args, dropout, is_causal=True)[0]
            if grouped:  # in float32, or with a mask, no fused kernel takes it
                unfused = aten._scaled_dot_product_attention_math
                return unfused(*args, mask, dropout, is_causal=causal, enable_gqa=True)[0]
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(*args, mask, True, dropout, is_causal=causal)[0]
        return func(*args, **kwargs)


class _FusedRMSNorm(torch.autograd.Function):
    """What aten._fused_rms_norm's CUDA kernel allocates and saves; elsewhere it is many operators.

    See layer_norm_kernel.cu and derivatives.yaml in PyTorch 2.13 (read, not measured).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
