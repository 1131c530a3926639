"""`Policy`: rules by the name of an operation, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perfuse.errors import ConfigError
from perfuse.precision.rules import ALIASES, TABLES, Rule
from perfuse.torch_compat.autocast import autocast_ops


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules that take precedence over PyTorch's in a region.

    Names are those of functions (`softmax` covers `torch.softmax`, `F.softmax` and
    `Tensor.softmax`), or of custom operators (`my_library::my_op`).
    """

    rules: tuple[tuple[str, Rule], ...] = ()  # sorted by name
    # The rule of each name that a call may have: `matmul` is `__matmul__` too.
    names: dict[str, Rule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = dict(self.rules)
        called = {alias: rules[name] for alias, name in ALIASES.items() if name in rules}
        called |= {name: rule for name, rule in rules.items() if "::" not in name}
        operators = {n.replace("::", "."): rule for n, rule in rules.items() if "::" in n}
        object.__setattr__(self, "names", called | operators)

    @staticmethod
    def of(rules: Policy | Mapping[str, Rule | str] | None) -> Policy:
        """The policy of a mapping from names to rules."""
        if isinstance(rules, Policy):
            return rules
        return Policy().with_rules(rules or {})

    def with_rules(self, rules: Mapping[str, Rule | str]) -> Policy:
        """This policy, but for these rules."""
        known = dict(self.rules) | {name: _rule(name, rule) for name, rule in rules.items()}
        return Policy(tuple(sorted(known.items())))

    def rule(self, name: str) -> Rule | None:
        """The rule of an operation; None where the policy has none."""
        return dict(self.rules).get(name)


def default_policy(device_type: str) -> Policy:
    """The rules of `torch.autocast` on one kind of device, in the installed PyTorch."""
    if device_type not in TABLES:
        known = ", ".join(TABLES)
        raise ConfigError(f"no policy for device type {device_type!r}", hint=f"known: {known}.")
    present = autocast_ops(device_type)
    return Policy.of({name: r for name, r in TABLES[device_type].items() if name in present})


def _rule(name: str, rule: Rule | str) -> Rule:
    try:
        return Rule(rule)
    except ValueError:
        choices = ", ".join(Rule)
        raise ConfigError(
            f"unknown rule {rule!r} for {name!r}", hint=f"choose one of: {choices}."
        ) from None
