"""Compressed optimizers for PyTorch: 8-bit moments and master weights of 24 or 32 bits made of 16-bit parameters.

Where transformers is installed, importing this package registers the optimizers with its Trainer.
"""

import importlib.util
import warnings

from hf_flashoptim.adam import FlashAdam, FlashAdamW
from hf_flashoptim.diagnostics import CompressionError, compression_error, compression_report
from hf_flashoptim.gradient_release import GradientReleaseHandle, enable_gradient_release
from hf_flashoptim.lion import FlashLion
from hf_flashoptim.optimizer import FlashOptimizer
from hf_flashoptim.precision import NumericsError, cast_model, compute_ecc_bits, reconstruct_fp32_param
from hf_flashoptim.sgd import FlashSGD, FlashSGDW

__all__ = [
    "CompressionError",
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashOptimizer",
    "FlashSGD",
    "FlashSGDW",
    "GradientReleaseHandle",
    "NumericsError",
    "cast_model",
    "compression_error",
    "compression_report",
    "compute_ecc_bits",
    "enable_gradient_release",
    "reconstruct_fp32_param",
]

if importlib.util.find_spec("transformers") is not None:
    try:
        from hf_flashoptim.monitor import FlashMonitorCallback
        from hf_flashoptim.trainer import register_optimizers
    except ImportError as error:
        warnings.warn(
            f"hf_flashoptim works in plain PyTorch only: transformers could not be used ({error}). Its Trainer is "
            "supported from transformers 5.2 on.",
            stacklevel=2,
        )
    else:
        register_optimizers()
        __all__ += ["FlashMonitorCallback", "register_optimizers"]
