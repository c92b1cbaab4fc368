"""Compressed optimizers for PyTorch: 8-bit moments and master weights of 24 or 32 bits made of 16-bit parameters."""

from hf_flashoptim.adam import FlashAdam, FlashAdamW
from hf_flashoptim.lion import FlashLion
from hf_flashoptim.optimizer import FlashOptimizer
from hf_flashoptim.precision import NumericsError, cast_model, compute_ecc_bits, reconstruct_fp32_param
from hf_flashoptim.sgd import FlashSGD, FlashSGDW

__all__ = [
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashOptimizer",
    "FlashSGD",
    "FlashSGDW",
    "NumericsError",
    "cast_model",
    "compute_ecc_bits",
    "reconstruct_fp32_param",
]
