"""One Lion step over many parameters, decoding and encoding compressed state on the way.

``lion_step`` is the op; ``lion_step_eager`` is its implementation for the CPU, in plain PyTorch for any device, and the
oracle of the GPU's kernel (``kernels/lion.py``, imported at the first call on a GPU).
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from hf_flashoptim.ops.chunked import FirstMoment, MasterWeight, item, read_gradient, walk
from hf_flashoptim.ops.registration import register_step


def lion_step_eager(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    error_bits: Sequence[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Step every parameter in place::

        g <- -g if maximize
        u <- beta1 * m + (1 - beta1) * g
        w <- w * (1 - lr * weight_decay) - lr * sign(u)             sign(inf) and sign(NaN) are NaN, so none is hidden
        m <- beta2 * m + (1 - beta2) * g

    A learning rate of 0 writes neither parameters nor error bits. All tensors are contiguous and all lists have one
    entry a parameter or, where stated, none. One call holds parameters of one dtype and one kind of state.

    Args:
        params: fp32, bf16 or fp16 weights w.
        grads: gradients g of the same shapes, any floating dtype.
        exp_avgs: m, as fp32 or as int8 codes.
        exp_avg_scales: bf16 scales of these codes (``ops/layout.py``); empty with fp32 moments.
        error_bits: int8 or int16 (``ops/error_correction.py``); empty without.
        lr: shape ``[]``, on the CPU or on the parameters' device.
        beta1: weight of m in the update.
        beta2: decay rate of m.
        weight_decay: coefficient, multiplied by lr.
        maximize: ascend.

    Source: Chen et al. (2023), algorithm 2.
    """
    rate = float(lr)
    for index, param in enumerate(params):
        if not param.numel():
            continue
        shape, pieces = walk(param, bool(exp_avg_scales))
        weight = MasterWeight(param, item(error_bits, index), shape)
        exp_avg = FirstMoment(exp_avgs[index], item(exp_avg_scales, index), shape)
        grad_rows = grads[index].view(shape)
        for piece in pieces:
            grad = read_gradient(grad_rows, piece, maximize)
            mean = exp_avg.read(piece, 1.0)
            if rate:
                update = (mean * beta1).add_(grad, alpha=1 - beta1)
                update = (update - update).add_(update.sign())
                master = weight.read(piece).mul_(1 - rate * weight_decay).sub_(update, alpha=rate)
                weight.write(piece, master)
            exp_avg.write(piece, mean.mul_(beta2).add_(grad, alpha=1 - beta2))


def _load_kernel() -> Callable[..., None]:
    from hf_flashoptim.kernels.lion import lion_step as launch

    return launch


lion_step = register_step(
    "lion_step",
    lion_step_eager,
    ("params", "exp_avgs", "exp_avg_scales", "error_bits"),
    _load_kernel,
)
