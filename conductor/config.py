"""Command line options of the conductor process."""

from dataclasses import dataclass

from moonserve.conductor.peers.leader_election_state import ClaimTerms
from moonserve.conductor.placement.admission import AdmissionMode, Limits
from moonserve.conductor.placement.policies import DEFAULT_POLICY, POLICY_CHOICES, make_policy
from moonserve.conductor.placement.policies.base import PlacementPolicy
from moonserve.conductor.placement.policies.baselines import DEFAULT_BALANCING_THRESHOLD
from moonserve.conductor.placement.tenant_fairness import parse_weights
from moonserve.conductor.role_switching import RoleController, RoleThresholds
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.membership.conductor_client import parse_addresses
from moonserve.protocol.process.config import option
from moonserve.protocol.process.lifecycle import ProcessConfig
from moonserve.protocol.process.tracing import TracingConfig
from moonserve.protocol.step_time import DEFAULT_TBT_SLO_S

DEFAULT_CLAIM_TERMS = ClaimTerms()
DEFAULT_ROLE_THRESHOLDS = RoleThresholds()
MIN_LEADER_TTL_S = 0.5  # a quarter of it is the timeout of a registry request
MAX_LEADER_TTL_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ConductorConfig(ProcessConfig, TracingConfig):
    """Options of the conductor process; every field is a flag."""

    instance_id: str = option("conductor", help="name of this process in logs")
    placement_policy: str = option(DEFAULT_POLICY, help=f"how the prefill instance is chosen: {POLICY_CHOICES}")
    balancing_threshold: float = option(
        DEFAULT_BALANCING_THRESHOLD,
        help="fetch a prefix when the best in the cluster is this many times longer; at least 1",
    )
    policy_seed: int = option(0, help="seed of the random policy")
    # The Mooncake paper's limit for an effective request.
    ttft_slo: float = option(30.0, help="reject when the predicted TTFT exceeds this, seconds")
    # The paper's 0.1 to 0.3 s are for GPUs. A CPU step with several long sequences takes tenths of a second (110M
    # parameters, 8 sequences of 2,048 tokens: 0.03 to 0.4 s by runtime), so 1 s rejects only truly overlong steps.
    tbt_slo: float = option(DEFAULT_TBT_SLO_S, help="reject when steps of over 95% of this are predicted, seconds")
    admission: str = option(
        AdmissionMode.PREDICTED.value,
        help="which predictions reject: none, of the load now, or of the decode load when the prompt is prefilled",
        choices=tuple(each.value for each in AdmissionMode),
    )
    tenant_weights: tuple[str, ...] = option(
        (), help="shares of tenants that compete for prefill, as alice=2,bob=0.5; 1 where not given"
    )
    scheduling_policy: str = option(
        "fcfs",
        help="order of the prefill workers' queues; give the workers the same option",
        choices=("fcfs", "priority"),
    )
    lease_s: float = option(5.0, help="remove an instance after this silence, seconds")
    heartbeat_interval_s: float = option(1.0, help="how often instances report, seconds")
    placement_ttl_s: float = option(900.0, help="drop a placement without a report of its end after this, seconds")
    num_decisions: int = option(4096, help="decisions kept for explanation")
    decision_mib: int = option(64, help="maximum memory for decisions kept for explanation, MiB")
    registry: str | None = option(
        None,
        help="registry where several conductors elect a leader: redis://…, redis+sentinel://… or the "
        "host:port of a directory; without it, this conductor leads",
        masked=True,
    )
    leader_ttl_s: float = option(
        DEFAULT_CLAIM_TERMS.ttl_s,
        help="with --registry: a leader that is dead or silent is replaced after this, seconds",
    )
    shards: str | None = option(
        None,
        help="addresses of all active conductors, this one's among them, separated by commas: each places requests on "
        "its own share of the instances, and none leads",
    )
    role_switching: str = option(
        "off",
        help="on = workers that can switch change between prefill and decode with the load",
        choices=("off", "on"),
    )
    role_hold_s: float = option(
        DEFAULT_ROLE_THRESHOLDS.hold_s,
        help="with --role-switching: seconds for which a need must last before a worker changes",
    )
    role_cool_down_s: float = option(
        DEFAULT_ROLE_THRESHOLDS.cool_down_s,
        help="with --role-switching: seconds between two changes",
    )
    conditional_disaggregation: str = option(
        "off",
        help="on = decode workers with this option prefill a prompt where its first token comes sooner and both "
        "objectives are met",
        choices=("off", "on"),
    )
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def policy(self) -> PlacementPolicy:
        """Returns a new placement policy. Raises ConfigError if the options are invalid."""
        return make_policy(self.placement_policy, self.balancing_threshold, self.policy_seed)

    def claim_terms(self) -> ClaimTerms:
        """Returns the durations of leadership claims. Raises ConfigError if `leader_ttl_s` is out of range."""
        if not MIN_LEADER_TTL_S <= self.leader_ttl_s <= MAX_LEADER_TTL_S:
            raise ConfigError(
                f"--leader-ttl-s ({self.leader_ttl_s}) must be {MIN_LEADER_TTL_S} to {MAX_LEADER_TTL_S:.0f}"
            )
        return ClaimTerms(ttl_s=self.leader_ttl_s)

    def own_shard(self) -> str:
        """Returns this conductor's entry in `shards`. Raises ConfigError if there is none."""
        own = f"{self.host}:{self.port}"
        if own not in parse_addresses(self.shards or ""):
            raise ConfigError(f"--shards ({self.shards}) must contain {own}, where this conductor listens")
        return own

    def role_controller(self) -> RoleController | None:
        """Returns a new role controller, or None without role switching. Raises ConfigError if options are invalid."""
        terms = RoleThresholds(hold_s=self.role_hold_s, cool_down_s=self.role_cool_down_s)
        return RoleController(terms) if self.role_switching == "on" else None

    def limits(self) -> Limits:
        """Returns the limits. Raises ConfigError if the values are out of range or contradict each other."""
        if not 0 < self.heartbeat_interval_s < self.lease_s:
            raise ConfigError(
                f"--heartbeat-interval-s ({self.heartbeat_interval_s}) must be positive and "
                f"shorter than --lease-s ({self.lease_s})"
            )
        if (
            min(self.ttft_slo, self.tbt_slo, self.placement_ttl_s) <= 0
            or min(self.num_decisions, self.decision_mib) < 1
        ):
            raise ConfigError(
                "--ttft-slo, --tbt-slo, --placement-ttl-s, --num-decisions and --decision-mib must be positive"
            )
        return Limits(
            ttft_slo_s=self.ttft_slo,
            tbt_slo_s=self.tbt_slo,
            admission=AdmissionMode(self.admission),
            lease_s=self.lease_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            placement_ttl_s=self.placement_ttl_s,
            num_decisions=self.num_decisions,
            decision_bytes=self.decision_mib * 2**20,
            tenant_weights=parse_weights(self.tenant_weights),
            by_priority=self.scheduling_policy == "priority",
            conditional_disaggregation=self.conditional_disaggregation == "on",
        )
