"""What state dicts of ``torch.optim`` and flashoptim 0.1.4 look like, and how to convert the latter.

flashoptim keeps a moment as ``<name>::quantized`` (codes of the parameter's shape) and ``<name>::scales``, fp16, one
for 32 elements of the flattened tensor; for bf16 parameters their bits are stored as bf16. Its codes are companded like
ours. Its error bits e mean ``master = narrow + e / (2^(b-1) - 1) * ULP(narrow) / 2`` for b = 8 or 16, and are stored in
the parameter's dtype: 8-bit ones by value, 16-bit ones by their bits. Its groups say ``master_bytewidth`` (0, 3 or 4).
"""

from typing import Any

import torch
from torch import Tensor

from hf_flashoptim.moments import Moment
from hf_flashoptim.ops.companding import saturating_square
from hf_flashoptim.ops.error_correction import compute_error_bits
from hf_flashoptim.ops.layout import GROUP_SIZE

CODES_SUFFIX, SCALES_SUFFIX = "::quantized", "::scales"
# Group entries that choose an implementation, or another optimizer's format, and mean nothing here.
GROUP_SWITCHES = (
    "amsgrad",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
    "master_bytewidth",
)


def is_flashoptim(group: dict[str, Any]) -> bool:
    """Whether a saved group was written by flashoptim."""
    return "master_bytewidth" in group


def is_torch(group: dict[str, Any]) -> bool:
    """Whether a saved group was written by ``torch.optim``, maybe after loading one of ours."""
    return "foreach" in group


def decode_moment(p: Tensor, moment: Moment, saved: dict[str, Any]) -> Tensor:
    """Pop flashoptim's codes and scales of one moment; the fp32 moment, on the parameter's device.

    Raises:
        ValueError: for a dtype or shape that does not fit the parameter.
    """
    codes = saved.pop(moment.name + CODES_SUFFIX)
    scales = saved.pop(moment.name + SCALES_SUFFIX, None)
    count = -(-p.numel() // GROUP_SIZE)
    if scales is None or scales.numel() != count or scales.dtype not in (torch.float16, torch.bfloat16):
        found = None if scales is None else (tuple(scales.shape), scales.dtype)
        raise ValueError(f"'{moment.name}{SCALES_SUFFIX}' is {found}; expected {count} fp16 scales.")
    if tuple(codes.shape) != tuple(p.shape) or not _holds_codes(codes, moment):
        raise ValueError(
            f"'{moment.name}{CODES_SUFFIX}' is {tuple(codes.shape)}, {codes.dtype}; expected {tuple(p.shape)}, "
            f"{moment.code_dtype}."
        )
    device = p.device
    scales = scales.to(device).contiguous().view(torch.float16).float().view(1, -1)
    rows = codes.to(device, moment.code_dtype).contiguous().view(1, -1)
    value = moment.decode_rows(rows, scales)
    value = saturating_square(value) if moment.code_dtype == torch.uint8 else value
    return value.reshape(p.shape)


def _holds_codes(codes: Tensor, moment: Moment) -> bool:
    # Through torch's own loading codes become floating, without loss.
    return codes.dtype == moment.code_dtype or codes.is_floating_point()


def convert_error_bits(narrow: Tensor, saved: Tensor, group: dict[str, Any], error_dtype: torch.dtype) -> Tensor:
    """flashoptim's error bits of a 16-bit parameter as ours.

    Raises:
        ValueError: if their dtype is not what the group's ``master_bytewidth`` says.
    """
    width = int(group["master_bytewidth"])
    if width == 3 and (saved.is_floating_point() or saved.dtype == torch.int8):
        steps, limit = saved.double(), 127
    elif width == 4 and saved.element_size() == 2:
        steps, limit = saved.contiguous().view(torch.int16).double(), 32767
    else:
        raise ValueError(f"'error_bits' is {saved.dtype}, which master_bytewidth={width} does not explain.")
    narrow = narrow.contiguous()
    mantissa, smallest = (7, -133) if narrow.dtype == torch.bfloat16 else (10, -24)
    exponent = torch.frexp(narrow.float())[1].sub(1 + mantissa).clamp(min=smallest)
    master = narrow.double() + steps / limit * torch.exp2(exponent.double() - 1)
    return compute_error_bits(master.float(), narrow, error_dtype)
