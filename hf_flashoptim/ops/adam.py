"""One Adam or AdamW step over many parameters, decoding and encoding compressed state on the way.

``adam_step`` is the op; ``adam_step_eager`` is its implementation for the CPU, in plain PyTorch for any device, and the
oracle of the GPU's kernel (``kernels/adam.py``, imported at the first call on a GPU).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_flashoptim.ops.chunked import FirstMoment, MasterWeight, SecondMoment, item, read_gradient, walk
from hf_flashoptim.ops.registration import register_step


def largest_update(step: float, beta1: float, beta2: float) -> float:
    """Largest magnitude of Adam's update at step t, in learning rates, over all gradients there can have been.

    Both moments are weighted means of the same gradients, with weights ``a_k = beta1^k (1 - beta1) / (1 - beta1^t)``
    and ``b_k = beta2^k (1 - beta2) / (1 - beta2^t)``, k < t, so by Cauchy and Schwarz it is ``sqrt(sum a_k^2 / b_k)``.
    Infinite (no bound) unless beta1^2 < beta2.

    Example:
        >>> [round(largest_update(t, 0.9, 0.999), 2) for t in (1, 10, 100, 1e6)]
        [1.0, 1.04, 2.24, 7.27]
    """
    if beta1**2 >= beta2:
        return math.inf  # it grows without limit
    ratio = beta1**2 / beta2
    terms = (1 - ratio**step) / (1 - ratio)
    return (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2) * terms)


# Smallest denominator of an update: with eps = 0, a weight that has had no gradient stays as it is.
SMALLEST = torch.finfo(torch.float32).tiny


def adam_step_eager(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    error_bits: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Step every parameter in place::

        t <- t + 1
        g <- -g if maximize;  g <- g + weight_decay * w unless decoupled
        m <- beta1 * m + (1 - beta1) * g
        s <- hypot(sqrt(beta2) * s, sqrt(1 - beta2) * g)                    s = sqrt(v), so squares never over- or underflow
        w <- w * (1 - lr * weight_decay) if decoupled
        w <- w - lr * clamp(m / (1 - beta1^t) / (s / sqrt(1 - beta2^t) + eps), +-largest_update(t))

    No gradients can make Adam's update larger than the clamp. But 8-bit codes can: an s far below its group's maximum
    may be stuck at its code while m grows.

    A learning rate of 0 writes neither parameters nor error bits. All tensors are contiguous and all lists have one
    entry a parameter or, where stated, none. One call holds parameters of one dtype and one kind of state.

    Args:
        params: fp32, bf16 or fp16 weights w.
        grads: gradients g of the same shapes, any floating dtype.
        exp_avgs: m, as fp32 or as int8 codes.
        exp_avg_scales: bf16 scales of these codes (``ops/layout.py``); empty with fp32 moments.
        exp_avg_sqs: v as fp32, or uint8 codes of s.
        exp_avg_sq_scales: bf16 scales of these codes; empty with fp32 moments.
        error_bits: int8 or int16 (``ops/error_correction.py``); empty without.
        steps: t, fp32 of shape ``[]`` on the parameters' device: read there, never by the host.
        lr: shape ``[]``, on the CPU or on the parameters' device.
        beta1: decay rate of m, below 1.
        beta2: decay rate of v, below 1.
        eps: added to the root of v.
        weight_decay: coefficient, multiplied by lr where it is decoupled.
        decoupled: AdamW's weight decay instead of L2 regularization.
        maximize: ascend.

    Source: Loshchilov and Hutter (2019), algorithm 2; FlashOptim (2026), algorithm 4.
    """
    rate = float(lr)
    for index, param in enumerate(params):
        step = float(steps[index].add_(1))
        if not param.numel():
            continue
        # The correction of m is left to the step size, so the bound is one of the uncorrected update.
        step_size = rate / (1 - beta1**step)
        bound = largest_update(step, beta1, beta2) * (1 - beta1**step)
        root_scale = 1 / math.sqrt(1 - beta2**step)
        shape, pieces = walk(param, bool(exp_avg_scales))
        weight = MasterWeight(param, item(error_bits, index), shape)
        exp_avg = FirstMoment(exp_avgs[index], item(exp_avg_scales, index), shape)
        exp_avg_sq = SecondMoment(exp_avg_sqs[index], item(exp_avg_sq_scales, index), shape, step)
        grad_rows = grads[index].view(shape)
        for piece in pieces:
            grad = read_gradient(grad_rows, piece, maximize)
            master = weight.read(piece)
            if weight_decay and not decoupled:
                grad = grad.add(master, alpha=weight_decay)
            mean = exp_avg.read(piece, beta1).add_(grad, alpha=1 - beta1)
            root = exp_avg_sq.read(piece, math.sqrt(beta2)).hypot_(grad * math.sqrt(1 - beta2))
            if rate:
                if weight_decay and decoupled:
                    master.mul_(1 - rate * weight_decay)
                denominator = (root * root_scale).add_(eps).clamp_(min=SMALLEST)
                update = (mean / denominator).clamp_(-bound, bound)
                weight.write(piece, master.sub_(update, alpha=step_size))
            exp_avg.write(piece, mean)
            exp_avg_sq.write(piece, root)


def _load_kernel() -> Callable[..., None]:
    from hf_flashoptim.kernels.adam import adam_step as launch

    return launch


adam_step = register_step(
    "adam_step",
    adam_step_eager,
    (
        "params",
        "exp_avgs",
        "exp_avg_scales",
        "exp_avg_sqs",
        "exp_avg_sq_scales",
        "error_bits",
        "steps",
    ),
    _load_kernel,
)
