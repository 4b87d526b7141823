"""Reads mixtures of experts from config.json. No torch."""

from dataclasses import dataclass, replace

from moonserve.engine.model.model_folder import JsonFields


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Activation of gpt-oss: gate · sigmoid(alpha · gate) · (up + 1), of gates of at most `limit` and ups within it."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """Router of DeepSeek, in float32: experts are chosen from the best groups only."""

    groups: int  # of the same number of experts
    chosen_groups: int
    scaling: float  # factor of the chosen experts' weights
    # True (V3): scores are sigmoids, to which corrections are added for the choice; a group counts the sum of its two
    # best. False (V2): scores are a softmax; a group counts its best.
    has_corrections: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of each layer's MLP: a router chooses `per_token` of `count` for every token."""

    count: int
    per_token: int
    normalised: bool  # the weights of the chosen ones are divided by their sum
    module: str  # name of the mixture in a checkpoint
    projections: tuple[str, str, str]  # names of an expert's gate, up and down
    clamped: ClampedGate | None = None  # None: SiLU. gpt-oss, which also stacks all experts in one tensor of each kind
    router: GroupedRouter | None = None  # None: the highest of a softmax are chosen
    shared_size: int = 0  # inner size of an MLP that every token uses beside the chosen ones; 0: there is none
    dense_layers: int = 0  # number of layers at the beginning that have a plain MLP instead
    dense_size: int = 0  # its inner size

    def inner_size(self, num_layers: int, size: int, used: float) -> float:
        """Returns the sum of the inner sizes of all MLPs, if `used` experts of this size are used in each layer."""
        mixtures = num_layers - min(self.dense_layers, num_layers)
        return mixtures * (used * size + self.shared_size) + (num_layers - mixtures) * self.dense_size

    def of_layers(self, layers: range) -> "Experts":
        return replace(self, dense_layers=min(len(layers), max(0, self.dense_layers - layers.start)))


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def _experts(
    fields: JsonFields,
    count: int,
    per_token: int,
    *,
    normalised: bool,
    module: str,
    projections: tuple[str, str, str],
    clamped: ClampedGate | None = None,
) -> Experts:
    """`count`, `per_token`: defaults of transformers."""
    found = Experts(
        count=fields.optional_count("num_experts") or fields.count("num_local_experts", default=count),
        per_token=fields.count("num_experts_per_tok", default=per_token),
        normalised=normalised,
        module=module,
        projections=projections,
        clamped=clamped,
    )
    if found.per_token > found.count:
        raise fields.error(f"num_experts_per_tok {found.per_token} is above the number of experts, {found.count}")
    return found


def qwen_experts(fields: JsonFields) -> Experts:
    normalised = fields.flag("norm_topk_prob", default=False)
    return _experts(fields, 128, 8, normalised=normalised, module="mlp", projections=_GATE_UP_DOWN)


def mixtral_experts(fields: JsonFields) -> Experts:
    return _experts(fields, 8, 2, normalised=True, module="block_sparse_moe", projections=("w1", "w3", "w2"))


def gpt_oss_experts(fields: JsonFields) -> Experts:
    gate = ClampedGate(fields.number("swiglu_alpha", default=1.702), fields.number("swiglu_limit", default=7.0))
    projections = ("gate_up_proj", "gate_up_proj", "down_proj")
    return _experts(fields, 128, 4, normalised=True, module="mlp", projections=projections, clamped=gate)


def deepseek_experts(fields: JsonFields, *, has_corrections: bool) -> Experts:
    """Like transformers, ignores norm_topk_prob of V2."""
    count, per_token = fields.count("n_routed_experts"), fields.count("num_experts_per_tok")
    groups = chosen = 1
    if has_corrections or fields.text("topk_method", default="greedy") != "greedy":
        groups, chosen = fields.count("n_group"), fields.count("topk_group")
    size, rest = divmod(count, groups)
    if rest or size < 1 + has_corrections or chosen > groups or per_token > chosen * size:
        raise fields.error(f"{per_token} experts of {count} cannot be chosen from {chosen} of {groups} groups")
    scaling = fields.number("routed_scaling_factor", default=1.0)
    inner_size = fields.count("moe_intermediate_size")
    return Experts(
        count=count,
        per_token=per_token,
        normalised=has_corrections and fields.flag("norm_topk_prob", default=True),
        module="mlp",
        projections=_GATE_UP_DOWN,
        router=GroupedRouter(groups, chosen, scaling, has_corrections),
        shared_size=fields.count("n_shared_experts") * inner_size,
        dense_layers=fields.count("first_k_dense_replace", default=0, minimum=0),
        dense_size=fields.count("intermediate_size"),
    )
