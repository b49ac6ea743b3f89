"""Muon: momentum, orthogonalised, for the matrices of the layers; Adam for everything else.

Input: Megatron's optimizers of this rank and the inventory of its weights. Output: the same
optimizers, with the update of each matrix W of shape [out, in] replaced by

    M <- mu M + (1 - mu) G,    U = mu M + (1 - mu) G  (Nesterov) or M
    W <- (1 - lr wd) W - lr s NS(U)

after K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024),
kellerjordan.github.io/posts/muon. NS makes all singular values of U about one. The scale s is 0.2
sqrt(max(out, in)) (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982, equation 4),
so that updates have the size of Adam's and the learning rate of Adam can be used, or Jordan's
sqrt(max(1, out / in)).

NS needs whole matrices. With tensor parallelism U is gathered, every rank computes the update of
the whole matrix and applies its shard. Query, key, value, gate and up are separate matrices,
although Megatron fuses them. Momentum is sharded as the weights are. Embedding, output layer, norms
and biases use Adam.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from megatron.core.optimizer import MegatronOptimizer

from rlpost.config.tree import Config
from rlpost.models.names import Dimensions, Layout
from rlpost.trainer import device
from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.torch_dist.optimizer_state import MATRICES
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.inventory import Held, Inventory, all_gather

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic, with the steepest slope at zero that keeps values near one."""
EPS = 1e-7


def orthogonalise(matrix: torch.Tensor, *, num_steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an approximation of U V^T for U S V^T = ``matrix``: [out, in], in ``dtype``.

    Newton-Schulz: X <- a X + (b G + c G^2) X with G = X X^T, from X of Frobenius norm one.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    if is_tall:  # the smaller Gram matrix
        x = x.mT
    x = x / x.norm().clamp(min=EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


@dataclass(frozen=True, slots=True)
class MuonSettings:
    """The settings of Muon, equal for all matrices."""

    momentum: float
    nesterov: bool
    num_steps: int
    matches_adam: bool
    """Whether the scale is that of arXiv 2502.16982, otherwise Jordan's."""
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Config) -> MuonSettings:
        """Return those of a run."""
        table = config.optimizer
        return cls(
            momentum=table.muon_momentum,
            nesterov=table.muon_nesterov,
            num_steps=table.muon_num_ns_steps,
            matches_adam=table.muon_scale == "match_rms_adam",
            dtype=device.weight_dtype(config.perf.bf16),
        )

    def update(self, direction: torch.Tensor) -> torch.Tensor:
        """[out, in] -> the update of a whole matrix for a learning rate of one, in float32."""
        rows, columns = direction.shape
        original, as_adam = math.sqrt(max(1.0, rows / columns)), 0.2 * math.sqrt(max(rows, columns))
        scale = as_adam if self.matches_adam else original
        return orthogonalise(direction, num_steps=self.num_steps, dtype=self.dtype).float() * scale


@dataclass(frozen=True, slots=True)
class Matrix:
    """The position of a weight of this rank in the matrices of the model."""

    held: Held
    dims: Dimensions

    def update(self, direction: torch.Tensor, settings: MuonSettings) -> torch.Tensor:
        """Compute this rank's shard of the update from its shard of the direction.

        Collective of the tensor-parallel ranks.
        """
        layout, dim, group = self._layout, self.held.dim, self.held.group
        whole = direction
        if dim is not None:
            whole = layouts.join(all_gather(direction, group), layout, dim=dim)
        parts = layouts.split(whole, layout, self.dims)
        updates = [settings.update(part) for part in parts]
        merged = layouts.merge(updates, layout, self.dims)
        if dim is None:
            return merged
        return layouts.shard(merged, layout, dim=dim, rank=group.rank(), size=group.size())

    @property
    def _layout(self) -> Layout:
        # one tensor in Hugging Face folders, but two matrices
        layout = self.held.rule.layout
        return "gated" if layout == "fused_gated" else layout


class ParamGroup(TypedDict, total=False):
    """The keys of an optimizer's parameter group that Muon reads."""

    params: list[torch.Tensor]
    lr: float
    weight_decay: float
    matrices: bool


class Muon(torch.optim.AdamW):
    """Muon for groups with ``MATRICES``, AdamW for the others.

    The momentum is the state ``exp_avg``. There is no second moment.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        matrices: Mapping[torch.Tensor, Matrix],
        settings: MuonSettings,
        **adam: object,
    ) -> None:
        """Create the optimizer.

        Each group has the key ``MATRICES``: whether all its parameters are in ``matrices``, which
        are by main weight. ``adam`` are arguments of AdamW; its learning rate and weight decay are
        also Muon's defaults.
        """
        self._matrices = matrices
        self._settings = settings
        super().__init__(groups, **adam)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters. Collective of the tensor-parallel ranks."""
        groups: list[ParamGroup] = self.param_groups
        for group in groups:
            if group[MATRICES]:
                for parameter in group["params"]:
                    self._update(parameter, lr=group["lr"], weight_decay=group["weight_decay"])
        self.param_groups: list[ParamGroup] = [group for group in groups if not group[MATRICES]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, weight: torch.Tensor, *, lr: float, weight_decay: float) -> None:
        gradient, state, momentum = weight.grad, self.state[weight], self._settings.momentum
        if gradient is None:
            return
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight)
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        average = state["exp_avg"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if self._settings.nesterov else average
        update = self._matrices[weight].update(direction, self._settings)
        weight.mul_(1 - lr * weight_decay).add_(update.to(weight.dtype), alpha=-lr)


def install(optimizer: MegatronOptimizer, inventory: Inventory, config: Config) -> None:
    """Replace Adam within Megatron's optimizers, which keep main weights, clipping and schedule.

    ``optimizer`` must not be distributed: each data-parallel rank needs whole shards.
    """
    table, muon_settings = config.optimizer, MuonSettings.of(config)
    held = {one.tensor: one for one in inventory.held.values() if _is_matrix(one)}
    for one in optimizer_state.inner(optimizer):
        matrices = {
            main: Matrix(held[parameter], inventory.dims)
            for parameter, main in optimizer_state.main_weights(one)
            if parameter in held
        }
        groups = [part for group in one.optimizer.param_groups for part in _split(group, matrices)]
        one.optimizer = Muon(
            groups,
            matrices,
            muon_settings,
            lr=table.lr,
            betas=(table.adam_beta1, table.adam_beta2),
            eps=table.adam_eps,
            weight_decay=table.weight_decay,
        )


def _is_matrix(held: Held) -> bool:
    return held.tensor.dim() == 2 and held.rule.megatron.startswith("decoder.layers.")


def _split(group: ParamGroup, matrices: Mapping[torch.Tensor, Matrix]) -> list[ParamGroup]:
    """Return a group of Megatron's as one of matrices and one of other parameters."""
    both: list[ParamGroup] = []
    for is_matrix in (True, False):
        chosen = [weight for weight in group["params"] if (weight in matrices) == is_matrix]
        both.append(group | {"params": chosen, MATRICES: is_matrix})
    return both
