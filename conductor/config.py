"""Command line options of the conductor process."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.admission import Admission
from conductor.fairness.shares import parse_weights
from conductor.leadership.state import Terms
from conductor.limits import Limits
from conductor.policies import DEFAULT_POLICY, POLICY_CHOICES, make_policy
from conductor.policies.base import PlacementPolicy
from conductor.policies.global_cache_aware import DEFAULT_BALANCING_THRESHOLD
from conductor.roles.controller import RoleController, RoleTerms
from protocol.config import option
from protocol.errors import ConfigError
from protocol.process import ProcessConfig
from protocol.tracing import TracingConfig

DEFAULT_TERMS = Terms()
DEFAULT_ROLE_TERMS = RoleTerms()
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
    tbt_slo: float = option(1.0, help="reject when steps of over 95% of this are predicted, seconds")
    admission: str = option(
        Admission.PREDICTED.value,
        help="which predictions reject: none, of the load now, or of the decode load when the prompt is prefilled",
        choices=tuple(each.value for each in Admission),
    )
    tenant_weights: tuple[str, ...] = option(
        (), help="shares of tenants that compete for prefill, as alice=2,bob=0.5; 1 where not given"
    )
    scheduling_policy: str = option(
        "fcfs",
        help="order of the prefill workers' queues, as they are told it themselves",
        choices=("fcfs", "priority"),
    )
    lease_s: float = option(5.0, help="remove an instance after this silence, seconds")
    heartbeat_interval_s: float = option(1.0, help="how often instances report, seconds")
    placement_ttl_s: float = option(900.0, help="forget a placement whose end nobody reported after this, seconds")
    num_decisions: int = option(4096, help="decisions kept for explanation")
    decision_mib: int = option(64, help="memory for decisions kept for explanation at most, MiB")
    registry: str | None = option(
        None,
        help="where several conductors agree which of them leads: redis://…, redis+sentinel://… or the "
        "host:port of a directory; without it, this one leads",
        masked=True,
    )
    leader_ttl_s: float = option(
        DEFAULT_TERMS.ttl_s,
        help="with --registry: a leader that is dead or silent is replaced after this, seconds",
    )
    role_switching: str = option(
        "off",
        help="on = workers that can are told to change between prefill and decode as load demands",
        choices=("off", "on"),
    )
    role_hold_s: float = option(
        DEFAULT_ROLE_TERMS.hold_s,
        help="with --role-switching: seconds for which a need must last before a worker changes",
    )
    role_cool_down_s: float = option(
        DEFAULT_ROLE_TERMS.cool_down_s,
        help="with --role-switching: seconds between two changes",
    )
    conditional_disaggregation: str = option(
        "off",
        help="on = decode workers that can prefill a prompt themselves where its first token comes sooner and both "
        "objectives are kept",
        choices=("off", "on"),
    )
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def policy(self) -> PlacementPolicy:
        """Returns a new placement policy. Raises ConfigError if the options are invalid."""
        return make_policy(self.placement_policy, self.balancing_threshold, self.policy_seed)

    def terms(self) -> Terms:
        """Returns the durations of leadership claims. Raises ConfigError if `leader_ttl_s` is out of range."""
        if not MIN_LEADER_TTL_S <= self.leader_ttl_s <= MAX_LEADER_TTL_S:
            raise ConfigError(
                f"--leader-ttl-s ({self.leader_ttl_s}) must be {MIN_LEADER_TTL_S} to {MAX_LEADER_TTL_S:.0f}"
            )
        return Terms(ttl_s=self.leader_ttl_s)

    def roles(self) -> RoleController | None:
        """Returns a new role controller, or None without role switching. Raises ConfigError if options are invalid."""
        terms = RoleTerms(hold_s=self.role_hold_s, cool_down_s=self.role_cool_down_s)
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
            admission=Admission(self.admission),
            lease_s=self.lease_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            placement_ttl_s=self.placement_ttl_s,
            num_decisions=self.num_decisions,
            decision_bytes=self.decision_mib * 2**20,
            tenant_weights=parse_weights(self.tenant_weights),
            by_priority=self.scheduling_policy == "priority",
            conditional=self.conditional_disaggregation == "on",
        )
