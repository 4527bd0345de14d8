"""Muon: orthogonalised momentum, each matrix on one rank.

The momentum lies in parts, as the parameters do. In each step it goes to the owners of
the matrices, is orthogonalised there by `newton_schulz`, and comes back in parts as the
direction of the step: see `matrix_exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fsfunc.comm.attribution import internal
from fsfunc.optim.element_rules import ElementRule
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import Mask, Tree, local_tensor, zeros_like
from fsfunc.optim.matching import Matched, wrong_state_error
from fsfunc.optim.matrix.matrix_exchange import (
    PLAIN_CODEC,
    DescentState,
    MatrixExchange,
    check_matrices,
    descent_rule,
    map_matrices,
    match_matrices,
)
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    finish_step,
    from_phases,
    optimizer_factory,
)
from fsfunc.optim.places import bring_together
from fsfunc.optim.schedules import Schedule
from fsfunc.tree.types import PyTree

# By shape, dtype and device: memory for X X', the polynomial of it, and a spare X.
Scratch = dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    scratch: Scratch | None = None,
) -> Tensor:
    """Returns ``U f(S) V'`` for a matrix ``U S V'``, with f near 1.

    All singular values become about equal: the matrix is nearly orthogonal.

    X = X / max(norm, eps), and then ``steps`` times, of a wide X::

        A = X X'        X = a X + (b A + c A^2) X

    Args:
        matrix: [m, n], in the dtype in which all of it is computed.
        coefficients: (a, b, c), by which the small singular values grow.
        steps: how often.
        eps: the least norm by which it is divided.
        scratch: memory for reuse between matrices, if nothing is differentiated.

    Cost: see `newton_schulz_flops`; in memory, besides the result, a matrix of its size
    and two of [m, m], m the shorter dim: once for each shape with ``scratch``.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks.

    >>> x = newton_schulz(torch.diag(torch.tensor([2.0, 0.5])), (2.0, -1.5, 0.5), 9, 0)
    >>> torch.allclose(x, torch.eye(2), atol=1e-3)
    True
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    if scratch is None:
        for _ in range(steps):
            gram = x @ x.T
            update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, update, x, beta=a)
        return x.T if is_tall else x
    key = *x.shape, x.dtype, x.device
    if key not in scratch:
        m = x.shape[0]
        scratch[key] = x.new_empty(m, m), x.new_empty(m, m), x.new_empty(x.shape)
    gram, update, spare = scratch[key]
    # Contiguous, as without scratch: other strides would give other bits.
    result = x.new_empty(x.shape)
    # To and fro between two buffers, so that the last step writes into the result.
    for remaining in reversed(range(steps)):
        out = spare if remaining % 2 else result
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        x = torch.addmm(x, update, x, beta=a, out=out)
    return x.T if is_tall else x


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Counts the multiplications and additions of one step for a matrix of this shape.

    >>> newton_schulz_flops((2, 3)) == 2 * (2 * 2 * 3) + 2 * 2**3 + 2 * (2 * 2 * 3)
    True
    """
    short, long = sorted(shape)
    return 4.0 * short * short * long + 2.0 * short**3


class MuonState(NamedTuple):
    """The count of updates, and the momentum, laid out as the parameters are."""

    count: int | Tensor
    momentum: PyTree


@optimizer_factory
def muon(
    learning_rate: float | Schedule = 1e-3,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
    ns_dtype: torch.dtype = torch.bfloat16,
    mask: Mask | None = None,
) -> Optimizer:
    """Makes Muon as ``torch.optim.Muon`` has it, each matrix computed by one rank.

    With g the gradient, l the learning rate and O `newton_schulz`::

        v = momentum v + (1 - momentum) g
        u = momentum v + (1 - momentum) g  if nesterov else  v
        p = p - l weight_decay p - l r O(u)

    with r = sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns)) with
    ``"match_rms_adamw"``.

    The momentum lies in parts, as the parameters do. u goes to the owner of each matrix
    and O(u) comes back, both in ``ns_dtype``, which is all that O sees of u. Owners are
    balanced by FLOPs. What ranks of a ``shard`` hold alike (at zero=0, or along
    ``replicate``) they share likewise: no matrix is done twice.

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        weight_decay: the share of itself that a leaf loses, times the learning rate.
        momentum: in [0, 1].
        nesterov: look ahead along the momentum.
        ns_coefficients, ns_steps, eps: of `newton_schulz`.
        adjust_lr_fn: how the rate depends on the shape: "original" (None is that too)
            or "match_rms_adamw".
        ns_dtype: of what is sent, and of the iterations: bfloat16, as torch has it.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.

    Returns:
        the optimizer; its state is a `MuonState`. All leaves with a gradient must be
        matrices, by their global shape.

    Raises:
        ValueError: a leaf that is no matrix (see `partition`); a negative number; 100
            steps or more; an unknown ``adjust_lr_fn``; an update without ``params``
            while weights decay; a vmap mesh.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: two all-to-alls, of b bytes an element in ``ns_dtype``. Of E elements of
    matrices, which k ranks hold each (1, or more along ``replicate``), h lie with their
    owners already: all ranks together send b (E - h) bytes to owners, and b (k E - h)
    back; at zero=0 over n ranks, b E (n - 1) back, and nothing there. FLOPs:
    `newton_schulz_flops` times ``ns_steps``, of a rank's own matrices. Momentum and
    parameters in one pass each, in place under `donate`; beside them, the size of the
    rank's parameters once more, and its own matrices twice in ``ns_dtype``. Along an
    axis that shares the work of one loss, such as a tensor parallel one, and does not
    split a leaf, each rank does that leaf by itself.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks; Liu
    et al., Muon is scalable for LLM training, for "match_rms_adamw".

    >>> optimizer = muon(0.1, weight_decay=0.0)
    >>> w = torch.zeros(2, 2)
    >>> grads = torch.diag(torch.tensor([100.0, 1.0]))
    >>> w, state = optimizer.apply(grads, optimizer.init(w), w)
    >>> (w.diagonal() < -0.06).tolist()  # both directions, though unlike, go as far
    [True, True]
    """
    if len(ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients is {ns_coefficients}: it has three numbers")
    if adjust_lr_fn not in _RATE_FACTORS:
        names = [name for name in _RATE_FACTORS if name]
        raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}: it is one of {names}")
    if not ns_dtype.is_floating_point:
        raise ValueError(f"ns_dtype is {ns_dtype}: take bfloat16, or a wider float")
    a, b, c = ns_coefficients
    orthogonal = partial(newton_schulz, coefficients=(a, b, c), steps=ns_steps, eps=eps)
    rule = descent_rule("muon", learning_rate, weight_decay, mask)
    ratio = _RATE_FACTORS[adjust_lr_fn]
    functions = _MuonFunctions(rule, momentum, nesterov, orthogonal, ratio, ns_dtype)
    return from_phases(functions.init, functions.phases)


def _original_ratio(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns))


# By ``adjust_lr_fn``: the factor of the learning rate for a matrix of this shape.
_RATE_FACTORS: dict[str | None, Callable[[int, int], float]] = {
    None: _original_ratio,
    "original": _original_ratio,
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


@dataclass(frozen=True, eq=False)
class _MuonFunctions:
    """The ``init`` and ``phases`` of a `muon`.

    Args:
        rule: the step along the directions.
        orthogonalize: ``orthogonalize(matrix, scratch=)``.
        rate_factor: of a matrix with so many rows and columns.
    """

    rule: ElementRule
    momentum: float
    nesterov: bool
    orthogonalize: Callable[..., Tensor]
    rate_factor: Callable[[int, int], float]
    ns_dtype: torch.dtype

    def init(self, params: Tree) -> MuonState:
        check_matrices(params, "muon")
        return MuonState(0, zeros_like(params))

    def phases(
        self, grads: Tree, state: MuonState, params: Tree, returns_params: bool
    ) -> Phases:
        if type(state) is not MuonState:
            raise wrong_state_error("muon", state, MuonState)
        like = grads if params is None else params
        matched = match_matrices("muon", like, grads, state.momentum)
        # All that is sent or multiplied comes before the ``yield``. It reads the
        # momentum, which is written over after it.
        directions = self._directions(matched)
        descent_state = DescentState(state.count, None)
        descent = PLAIN_CODEC.phases(
            self.rule, directions, descent_state, params, returns_params
        )
        next(descent)
        momenta, weight = Matched.of(state.momentum, grads), 1 - self.momentum
        yield
        if returns_params and not matched.differentiated:
            (v,) = run_kernel(momenta, partial(torch._foreach_lerp_, weight=weight))
        else:
            v = momenta.map_params(lambda v, g: v.lerp(g.to(v.dtype), weight))
        new_tree, _ = finish_step(descent)
        return new_tree, MuonState(state.count + 1, v)

    def _directions(self, matched: Matched) -> Tree:
        """Returns the orthogonalised direction of each parameter, with its factor."""
        leaves, differentiated = matched.columns[0], matched.differentiated
        needs_graph = differentiated and torch.is_grad_enabled()
        with internal(), torch.set_grad_enabled(needs_graph):
            exchange = MatrixExchange(
                leaves, newton_schulz_flops, "muon", share_copies=not differentiated
            )
            parts = [
                local_tensor(x)
                for x in matched.buffers[1].rebuild(self._inputs(matched))
            ]
            factors = [self.rate_factor(*x.shape) if x.numel() else 1.0 for x in leaves]
            scratch: Scratch | None = None if differentiated else {}
            orthogonalize = partial(self.orthogonalize, scratch=scratch)

            def orthogonalize_all(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
                return {i: orthogonalize(x) for i, x in matrices.items()}

            return map_matrices(matched, exchange, parts, orthogonalize_all, factors)

    def _inputs(self, matched: Matched) -> list[Tensor]:
        """Returns what is orthogonalised: the new momentum, or Nesterov's; flat."""
        _, grads, momenta = (b.tensors for b in matched.buffers)
        inputs = []
        for g, v in zip(grads, momenta, strict=True):
            g, v = bring_together([g, v])
            g = g.to(v.dtype)
            u = v.lerp(g, 1 - self.momentum)
            u = g.lerp(u, self.momentum) if self.nesterov else u
            inputs.append(u.to(self.ns_dtype))  # cast before it is sent: fewer bytes
        return inputs
