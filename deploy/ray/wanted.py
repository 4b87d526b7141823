"""Which processes there are to be, by kind and number: the YAML's, and what operators and autoscaler change. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.ray.config import ClusterConfig
from deploy.ray.units import ROLES, Kind, Unit
from protocol.errors import ConfigError

# Stores follow the hosts, and there is one directory at most.
COUNTED = (Kind.CONDUCTOR, Kind.PREFILL, Kind.DECODE, Kind.GATEWAY)


class Wanted:
    """Numbers by kind. One that was dismissed leaves a gap, which the next addition fills."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        counts = {
            Kind.DIRECTORY: int(config.needs_directory),
            Kind.CONDUCTOR: config.conductors.count,
            Kind.PREFILL: config.prefill.count,
            Kind.DECODE: config.decode.count,
            Kind.GATEWAY: config.gateways.count,
        }
        self._numbers = {kind: set(range(count)) for kind, count in counts.items()}

    def units(self, stores: Sequence[int]) -> list[Unit]:
        """All, in the order in which they start. `stores`: numbers of the store nodes."""
        numbers = {**self._numbers, Kind.STORE: set(stores)}
        return [Unit(kind, number) for kind in Kind for number in sorted(numbers[kind])]

    def counts(self) -> dict[Kind, int]:
        return {kind: len(self._numbers[kind]) for kind in COUNTED}

    @property
    def num_workers(self) -> int:
        return sum(len(self._numbers[kind]) for kind in ROLES)

    def scale(self, kind: Kind, count: int) -> None:
        """Raises ConfigError for what cannot be."""
        self._check(kind, count)
        numbers = self._numbers[kind]
        while len(numbers) < count:
            self.add(kind)
        while len(numbers) > count:
            numbers.discard(max(numbers))

    def add(self, kind: Kind) -> None:
        numbers = self._numbers[kind]
        numbers.add(next(n for n in range(len(numbers) + 1) if n not in numbers))

    def dismiss(self, unit: Unit) -> None:
        """This one shall leave. Raises ConfigError where that must not be."""
        if unit.kind not in COUNTED:
            raise ConfigError(f"a {unit.kind} cannot be drained: {', '.join(COUNTED)} can")
        if self._numbers[unit.kind] == {unit.number}:
            raise ConfigError(f"it is the last {unit.kind}: without one, requests fail")
        self._numbers[unit.kind].discard(unit.number)

    def to_record(self) -> dict[str, list[int]]:
        return {kind.value: sorted(numbers) for kind, numbers in self._numbers.items()}

    def restore(self, record: Mapping[str, Sequence[int]]) -> None:
        self._numbers = {Kind(kind): set(numbers) for kind, numbers in record.items()}

    def _check(self, kind: Kind, count: int) -> None:
        if kind not in COUNTED:
            raise ConfigError(
                f"{kind} cannot be scaled; {', '.join(COUNTED)} can, and stores follow the hosts"
            )
        if count < 1:
            raise ConfigError(f"{kind}={count}: at least 1; `down` takes the cluster away")
        if kind is Kind.CONDUCTOR and count > self._config.conductors.count:
            raise ConfigError(
                f"the others know addresses of {self._config.conductors.count} conductors: give conductors.count in "
                "the YAML and deploy again"
            )
        if kind is Kind.GATEWAY and self._config.gateways.count == 1 < count:
            raise ConfigError(
                "a gateway that began alone does not share its port: give gateways.count in the YAML and deploy again"
            )
