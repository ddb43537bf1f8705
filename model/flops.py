"""Floating-point operations of one training token, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

from model.config import ModelConfig


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Forward and backward FLOPs per token, a multiply-add counted as two; recompute not counted.

    A matrix product with a weight costs 2 FLOPs per weight and token forward, 4 backward (one
    product for the input's gradient, one for the weight's). Attention's two products, q k^T and
    weights x v, cost 2 x 2 x sequence_length x width forward per layer and token, twice that
    backward. As in PaLM (arXiv 2204.02311, appendix B) the causal mask is not discounted, and
    embedding look-ups, norms and activation functions are left out. Nor is the mask between
    documents: with data.document_masking the MFU counts scores that nothing uses.
    """
    matmul_weights = config.layers * config.matmul_parameters_per_block()
    matmul_weights += config.padded_vocabulary_size * config.width
    attention = 2 * 2 * sequence_length * config.width * config.layers
    return 3 * (2 * matmul_weights + attention)
