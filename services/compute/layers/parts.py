"""What a layer is made of: a mixer, a feed-forward, their norms, and the residual stream.

The parts are written once. A `StepContext` carries out their operations: in plain torch on the CPU
(eager_step.py), by fused kernels on a GPU (kernel_step.py).

Shape legend: T tokens, E hidden width, F inner width of the MLP, H query heads, K kv heads,
D head width, C = (H + 2K) * D, N width of what does not rotate of a head, V of its value, R of the
latent, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from services.compute.distributed.shard import HeadPart
from services.compute.kernels.experts.routing import HeldExperts, Routing
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.rope import RopeSpec
from services.compute.layers.weighted_layers import Embedding, Norm

if TYPE_CHECKING:  # a kernel's, which the CPU has no Triton for
    from services.compute.kernels.ranks.rank_rows import RankRows

L = TypeVar("L")
"""A linear map in the form in which a device multiplies by it."""

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "relu2"]
"""gelu by the error function, gelu_tanh its approximation, relu2 the square of relu (Nemotron)."""

Gating: TypeAlias = 'Activation | Literal["swiglu_oai"]'
"""What experts make of gate and up: activation(gate) * up; swiglu_oai is gpt-oss's, which limits
both: g * sigmoid(1.702 g) * (u + 1) of g = min(gate, 7) and u = up from -7 to 7."""


@dataclass(slots=True, eq=False)
class Hidden:
    """The residual stream, and what a part has added to it if no launch has done the sum yet."""

    x_TE: Tensor
    delta_TE: Tensor | RankRows | None = None
    behind: Norm | None = None  # of the delta, before the sum
    scale: float = 1.0  # of the delta

    def forget(self) -> None:
        """The delta has been added."""
        self.delta_TE, self.behind, self.scale = None, None, 1.0


@dataclass(slots=True, eq=False)
class Normed:
    """The norm of the residual stream; without one, the stream as it is.

    The value may come late, so that a product can take the norm into its own launch.
    """

    hidden: Hidden
    norm: Norm | None
    value_TE: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Activated:
    """activation(gate) * up, for the product behind it to make in the form that it wants."""

    gate_up_TF2: Tensor
    activation: Activation


Input: TypeAlias = "Tensor | Normed | Activated"


class StepContext(Protocol[L]):
    """One step on its way through the layers: its inputs, the cache, and the device's operations.

    Results are overwritten once the next sublayer begins.
    """

    def embed(self, embedding: Embedding) -> Hidden: ...

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        """Begin a sublayer."""
        ...

    def computed(self, x: Input) -> Tensor:
        """The value, for what several parts read."""
        ...

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        """x += scale * behind(delta)."""
        ...

    def settle(self, hidden: Hidden) -> None:
        """Do the sum now: another part is to add something before the next norm."""
        ...

    def linear(self, x: Input, linear: L) -> Tensor: ...

    def linear_out(self, x: Input, linear: L) -> Tensor:
        """The same, for the last product of a part: its result lasts until it is added."""
        ...

    def gated(self, x: Input, gate_up: L, activation: Activation) -> Input:
        """activation(gate) * up; the map's first half are the gates."""
        ...

    def activated(self, x: Input, up: L, activation: Activation) -> Tensor: ...

    def attend(self, qkv_TC: Tensor, attention: Attention[L]) -> Tensor:
        """Rotate, store keys and values, and mix; returns [T, H * D]."""
        ...

    def attend_latent(self, down_TC: Tensor, attention: LatentAttention[L]) -> Tensor:
        """Norm, rotate and store latents, make queries, and mix; returns [T, H * V]."""
        ...

    def experts(self, x_TE: Tensor, experts: Experts[L], shared_TE: Tensor | None) -> Tensor:
        """The weighted sum of what each row's experts make of it, added in float32 in the order in
        which they were chosen, and of what the shared one has made; lasts until it is added."""
        ...


class LayerPart(Protocol[L]):
    """A mixer or a feed-forward."""

    def __call__(self, x: Input, step: StepContext[L]) -> Tensor:
        """What it adds to the residual stream, [T, E]."""
        ...


@dataclass(frozen=True, slots=True)
class Temperature:
    """A query n times `floor` positions on counts 1 + strength * log(1 + n) times (Llama 4).

    So a long context does not level its scores (Nakanishi, 2025).
    """

    floor: int
    strength: float
    first: int = 1  # the number of the first position: 0 of Ministral 3

    def at(self, positions_T: Tensor) -> Tensor:
        """What queries at these positions are multiplied by, in float32."""
        floors_T = torch.floor((positions_T.float() + self.first) / self.floor)
        return torch.log1p(floors_T) * self.strength + 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Attention(Generic[L]):
    """Attention with grouped-query heads (Ainslie et al., 2023); one product for q, k and v.

    The weight of a norm of queries or keys is of one head, or of all, one after the other.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: L
    out: L
    scale: float  # of the scores
    rope: RopeSpec | None  # None: the layer sees no positions
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norms_rotated: bool = False  # the norms come after the rotation
    norms_all_heads: bool = False  # one norm of all heads together
    part: HeadPart | None = None  # which heads these are, where such a norm is of several ranks'
    temperature: Temperature | None = None  # None: queries do not grow with their position
    span: AttentionSpan = FULL  # of positions that a query sees
    softcap: float = 0.0  # softcap * tanh(score / softcap); 0: as they are
    sinks_H: Tensor | None = None  # float32, a logit in every softmax that has no value

    @property
    def rotation_scale(self) -> float:
        """What the rotation of queries may carry of the scale of scores, which saves a pass over
        them. The norm that comes after a rotation would undo it."""
        return 1.0 if self.norms_rotated else self.scale

    def __call__(self, x: Input, step: StepContext[L]) -> Tensor:
        return step.linear_out(step.attend(step.linear(x, self.qkv), self), self.out)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention(Generic[L]):
    """Multi-head latent attention (DeepSeek V2, 2024): all heads' keys and values are made of one
    latent, which is what is kept of a token, beside a rotated part of the keys that they share.

    Keys and values need not be made: a query times the map of its head's keys meets the latents as
    they are, and the mix of latents times the map of its values is the head's result (the paper's
    absorption).
    """

    layer: int
    num_heads: int
    down: L  # all that is made of the input: queries or their latent, the latent, the rotated part
    out: L
    latent_norm: Norm
    up_HXR: Tensor  # what makes of a latent a head's key, so far as it does not rotate, and value
    still_dim: int  # of X, of the key
    scale: float  # of the scores
    rope: RopeSpec  # of the rotated part
    query_norm: Norm | None = None
    query_up: L | None = None  # of the queries' latent; None: `down` makes queries

    num_kv_heads: ClassVar[int] = 1
    span: ClassVar[AttentionSpan] = FULL
    temperature: ClassVar[None] = None
    rotation_scale: ClassVar[float] = 1.0  # most of a query does not rotate

    @property
    def key_up_HNR(self) -> Tensor:
        return self.up_HXR[:, : self.still_dim]

    @property
    def value_up_HVR(self) -> Tensor:
        return self.up_HXR[:, self.still_dim :]

    @property
    def latent_dim(self) -> int:
        return self.up_HXR.shape[2]

    @property
    def entry_dim(self) -> int:
        """What is kept of a token: the latent, then the rotated part."""
        return self.latent_dim + self.rope.head_dim

    def __call__(self, x: Input, step: StepContext[L]) -> Tensor:
        return step.linear_out(step.attend_latent(step.linear(x, self.down), self), self.out)


Mixer: TypeAlias = "Attention[L] | LatentAttention[L]"


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP(Generic[L]):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    gate_up: L
    down: L
    activation: Activation = "silu"

    def __call__(self, x: Input, step: StepContext[L]) -> Tensor:
        return step.linear_out(step.gated(x, self.gate_up, self.activation), self.down)


@dataclass(frozen=True, slots=True, eq=False)
class MLP(Generic[L]):
    up: L
    down: L
    activation: Activation

    def __call__(self, x: Input, step: StepContext[L]) -> Tensor:
        return step.linear_out(step.activated(x, self.up, self.activation), self.down)


@dataclass(frozen=True, slots=True, eq=False)
class Experts(Generic[L]):
    """A mixture of experts (Shazeer et al., 2017): of many gated MLPs, each row goes to a few.

    The maps of experts are as many as are held here, or one with the rows of all, one expert's
    below the other's, as the device wants them.
    """

    router: L  # makes the experts' logits, in float32
    routing: Routing
    gate_up: tuple[L, ...]
    down: tuple[L, ...]
    gating: Gating = "silu"
    choice_bias_X: Tensor | None = None  # float32: of the choice alone
    tokens_X: Tensor | None = None  # int64: how many each was given, if they are counted
    shared: GatedMLP[L] | None = None  # sees all rows
    scales_input: bool = False  # by the weight of the one expert, in place of its output
    shared_gate: L | None = None  # makes the logit of the shared one's share, in float32
    held: HeldExperts | None = None  # None: all of them

    @property
    def num_held(self) -> int:
        """Experts that there are maps of."""
        return self.routing.num_experts if self.held is None else self.held.num_slots

    def __call__(self, x: Input, step: StepContext[L]) -> Tensor:
        x_TE = step.computed(x)
        shared_TE = None if self.shared is None else self.shared(x_TE, step)
        return step.experts(x_TE, self, shared_TE)


@dataclass(frozen=True, slots=True, eq=False)
class Sublayer(Generic[L]):
    """A part with the norm before it, the one behind it, and the scale of what it adds."""

    norm: Norm | None
    part: LayerPart[L]
    behind: Norm | None = None
    scale: float = 1.0

    def __call__(self, hidden: Hidden, step: StepContext[L]) -> None:
        delta_TE = self.part(step.normed(hidden, self.norm), step)
        step.add(hidden, delta_TE, self.behind, self.scale)


class Layer(Protocol[L]):
    @property
    def last(self) -> tuple[Norm | None, float]:
        """The norm behind what the layer adds last, and its scale."""
        ...

    @property
    def parts(self) -> tuple[LayerPart[L], LayerPart[L]]:
        """The mixer and the feed-forward."""
        ...

    def __call__(self, hidden: Hidden, step: StepContext[L]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class SerialLayer(Generic[L]):
    """The mixer, then the feed-forward."""

    mixer: Sublayer[L]
    feed_forward: Sublayer[L]

    @property
    def last(self) -> tuple[Norm | None, float]:
        return self.feed_forward.behind, self.feed_forward.scale

    @property
    def parts(self) -> tuple[LayerPart[L], LayerPart[L]]:
        return self.mixer.part, self.feed_forward.part

    def __call__(self, hidden: Hidden, step: StepContext[L]) -> None:
        self.mixer(hidden, step)
        self.feed_forward(hidden, step)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelLayer(Generic[L]):
    """Mixer and feed-forward of one and the same input (Wang and Komatsuzaki, 2021)."""

    norm: Norm
    mixer: LayerPart[L]
    feed_forward: LayerPart[L]

    @property
    def last(self) -> tuple[Norm | None, float]:
        return None, 1.0

    @property
    def parts(self) -> tuple[LayerPart[L], LayerPart[L]]:
        return self.mixer, self.feed_forward

    def __call__(self, hidden: Hidden, step: StepContext[L]) -> None:
        x_TE = step.computed(step.normed(hidden, self.norm))
        step.add(hidden, self.mixer(x_TE, step), None, 1.0)
        step.settle(hidden)
        step.add(hidden, self.feed_forward(x_TE, step), None, 1.0)
