"""One SGD step over many parameters, decoding and encoding compressed state on the way.

``sgd_step`` is the op; ``sgd_step_eager`` is its implementation for the CPU, in plain PyTorch for any device, and the
oracle of the GPU's kernel (``kernels/sgd.py``, imported at the first call on a GPU).
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from hf_flashoptim.ops.chunked import FirstMoment, MasterWeight, item, read_gradient, walk
from hf_flashoptim.ops.registration import register_step


def sgd_step_eager(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    momentum_buffer_scales: Sequence[Tensor],
    error_bits: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Step every parameter in place::

        t <- t + 1
        g <- -g if maximize;  g <- g + weight_decay * w unless decoupled
        b <- momentum * b + g * (1 if t = 1 else 1 - dampening)
        w <- w * (1 - lr * weight_decay) if decoupled
        w <- w - lr * (g + momentum * b if nesterov else b)

    Without momentum there is neither b nor t, and w <- w - lr * g. A learning rate of 0 writes neither parameters nor
    error bits. All tensors are contiguous and all lists have one entry a parameter or, where stated, none. One call
    holds parameters of one dtype and one kind of state.

    Args:
        params: fp32, bf16 or fp16 weights w.
        grads: gradients g of the same shapes, any floating dtype.
        momentum_buffers: b, as fp32 or as int8 codes (``ops/companding.py``, first moment); empty without momentum.
        momentum_buffer_scales: bf16 scales of these codes (``ops/layout.py``); empty with fp32 buffers.
        error_bits: int8 or int16 (``ops/error_correction.py``); empty without.
        steps: t, fp32 of shape ``[]`` on the parameters' device: read there, never by the host; empty without momentum.
        lr: shape ``[]``, on the CPU or on the parameters' device.
        momentum: decay rate of b, 0 for none.
        dampening: what b leaves out of the gradient after the first step.
        weight_decay: coefficient, multiplied by lr where it is decoupled.
        nesterov: look ahead.
        decoupled: decay weights instead of L2 regularization.
        maximize: ascend.

    Source: ``torch.optim.SGD``, whose first step is not dampened either.
    """
    rate = float(lr)
    for index, param in enumerate(params):
        gradient_share = 1 - dampening if steps and steps[index].add_(1) > 1 else 1.0
        if not param.numel():
            continue
        shape, pieces = walk(param, bool(momentum_buffer_scales))
        weight = MasterWeight(param, item(error_bits, index), shape)
        buffer = None
        if momentum_buffers:
            buffer = FirstMoment(momentum_buffers[index], item(momentum_buffer_scales, index), shape)
        grad_rows = grads[index].view(shape)
        for piece in pieces:
            grad = update = read_gradient(grad_rows, piece, maximize)
            master = weight.read(piece)
            if weight_decay and not decoupled:
                grad = update = grad.add(master, alpha=weight_decay)
            if buffer is not None:
                velocity = buffer.read(piece, momentum).add_(grad, alpha=gradient_share)
                buffer.write(piece, velocity)
                update = grad.add(velocity, alpha=momentum) if nesterov else velocity
            if rate:
                if weight_decay and decoupled:
                    master.mul_(1 - rate * weight_decay)
                weight.write(piece, master.sub_(update, alpha=rate))


def _load_kernel() -> Callable[..., None]:
    from hf_flashoptim.kernels.sgd import sgd_step as launch

    return launch


sgd_step = register_step(
    "sgd_step",
    sgd_step_eager,
    ("params", "momentum_buffers", "momentum_buffer_scales", "error_bits", "steps"),
    _load_kernel,
)
