# SPDX-License-Identifier: Apache-2.0
"""The guards around a role policy. Router and simulator use this class, so a policy does the same in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pd_connector.pauses import doubled_s
from scheduler_plugins.router.policies.added import PolicyError
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Member, Move, RolePolicy, Scale
from scheduler_plugins.router.roles.scaling import Limits, ScaleGuards

DWELL_S = 30.0
"""An engine keeps a new role at least this long."""
PAUSE_S = 5.0
"""Time between two moves of a group. The first move must show its effect before the second."""
LONGEST_TURN_S = 60.0
"""The dwell of a group does not double beyond this. A longer one holds a group on the wrong side when its traffic changes:
a fleet that had swung three times was held for four minutes, with nearly all requests late."""
LONGEST_PAUSE_S = 3600.0
"""The time until a failed move is tried again does not double beyond this."""
_TOWARDS = {Role.PREFILL: -1, Role.BOTH: 0, Role.DECODE: 1}
_SIDES = (Role.PREFILL, Role.DECODE)


def pause_s(failures: int, first_s: float) -> float:
    """Seconds until a move is tried again that has failed this number of times in a row."""
    return doubled_s(first_s, failures - 1, LONGEST_PAUSE_S)


@dataclass
class _Swing:
    """The last moves of a group in one direction or the other."""

    moved_s: float = -inf  # the last move
    towards: int = 0  # its direction: -1 prefill, 1 decode
    dwell_s: float = 0.0  # the direction must not turn earlier than this after `moved_s`


class RoleController:
    """Asks a policy for moves, and lets those through that keep the guards.

    | guard | what it means |
    |---|---|
    | dwell | an engine keeps a role for `dwell_s`; a group does not turn its direction within `dwell_s` of a move |
    | doubling | a direction that turns back within two dwells doubles the group's dwell, up to `LONGEST_TURN_S`;
        a calmer turn resets it |
    | pause | a group has one move within `pause_s` |
    | minima | `min_prefill` and `min_decode` engines of each group stay alive on their side |
    | may, pins | an engine gets only roles that it may have; a pinned engine keeps its role |
    | repair | if all engines of a side are dead, an engine of the other side moves at once; only `may` and pins hold.
        It goes home after a dwell, when the side has other engines again |

    Numbers of engines (`Scale`) have guards of their own (`scaling.ScaleGuards`). They are refused without `limits`.

    A policy that fails, or proposes what no fleet can do, loses that proposal and nothing else: guards and repairs go on.
    `fault` says what was wrong in the last call of `moves`.

    The caller carries out each move that `moves` returns, and then calls `done` or `failed`. Until then the engine is
    moving. Any clock can be used for times. If it jumps back, moves are delayed by at most the dwell.
    """

    def __init__(
        self,
        policy: RolePolicy,
        *,
        dwell_s: float = DWELL_S,
        pause_s: float = PAUSE_S,
        min_prefill: int = 1,
        min_decode: int = 1,
        limits: Limits | None = None,
    ) -> None:
        """`min_prefill`, `min_decode`: of each group. `limits`: None if no engine is started or stopped."""
        self.policy = policy
        self.fault: BaseException | None = None
        self.scales: list[Scale] = []
        """The number of engines of each side, after each call of `moves`."""
        self._scaling = None if limits is None else ScaleGuards(limits)
        self._dwell_s = dwell_s
        self._pause_s = pause_s
        self._minima = {Role.PREFILL: min_prefill, Role.DECODE: min_decode}
        self._pinned: set[str] = set()
        self._moving: dict[str, Role] = {}
        self._repaired: set[str] = set()
        self._since_s: dict[str, float] = {}
        self._failures: dict[str, tuple[float, int]] = {}
        self._swings: dict[str, _Swing] = {}

    def pin(self, engine: str) -> None:
        """An operator gave this engine its role. It keeps it."""
        self._pinned.add(engine)

    def release(self, engine: str) -> None:
        """The engine may move again. Unknown names change nothing."""
        self._pinned.discard(engine)

    def done(self, engine: str, now_s: float) -> None:
        """The engine has its new role. Its dwell begins."""
        self._moving.pop(engine, None)
        self._failures.pop(engine, None)
        self._since_s[engine] = now_s

    def failed(self, engine: str, now_s: float, cause: str) -> None:
        """The move failed, and the engine has its old role again.

        It is not tried again for a dwell, which doubles with each failure in a row.
        """
        self._moving.pop(engine, None)
        self._repaired.discard(engine)
        self._failures[engine] = (now_s, self._failures.get(engine, (0.0, 0))[1] + 1)

    def not_started(self, group: str, role: Role, now_s: float) -> None:
        """Engines of `scales` could not be started. During a pause no more are requested."""
        if self._scaling is not None:
            self._scaling.failed(group, role, now_s)

    def moves(self, fleet: Fleet, now_s: float) -> list[Move]:
        """Moves to carry out now: at most one for each group. Call it about once a second. Numbers of engines are in
        `scales` afterwards."""
        self._forget(fleet.members, now_s)
        if self._scaling is not None:
            fleet = fleet._replace(coming=self._scaling.coming(fleet.members, now_s))
        groups = dict[str, list[Member]]()
        for each in fleet.members:
            groups.setdefault(each.group, []).append(each)
        moves = dict[str, Move]()
        for name, members in groups.items():
            if (repair := self._repair(members)) is not None:
                moves[name] = repair
                self._repaired.add(repair.engine)
        spare = {name: self._spare(members) for name, members in groups.items()}
        seen = [self._guarded(each, spare[each.group], now_s) for each in fleet.members]
        members_by_name = {each.name: each for each in seen}
        homes = [
            Move(each.name, each.home, f"other {each.role} engines are alive again")
            for each in seen
            if each.name in self._repaired and each.home in each.may
        ]
        proposed, scales = self._proposed(fleet._replace(members=seen), now_s)
        if self._scaling is not None:
            self.scales = self._scaling.settle(scales, fleet.members, self._pinned, now_s)
        for move in [*homes, *proposed]:
            member = members_by_name[move.engine]
            if member.group in moves or move.role is member.role:
                continue
            if move.role in member.may:
                moves[member.group] = move
                self._repaired.discard(move.engine)
        for name, move in moves.items():
            self._begin(name, members_by_name[move.engine].role, move, now_s)
        return list(moves.values())

    def _proposed(self, fleet: Fleet, now_s: float) -> tuple[list[Move], list[Scale]]:
        """What the policy proposes and has a meaning."""
        self.fault, moves, scales = None, list[Move](), list[Scale]()
        names = [member.name for member in fleet.members]
        group_names = {member.group for member in fleet.members}
        try:
            for proposal in self.policy.decide(fleet, now_s):
                if isinstance(proposal, Scale) and self._scaling is not None:
                    problem = _scale_problem(proposal, group_names)
                else:
                    problem = _problem(proposal, names)
                if problem:
                    self.fault = PolicyError(f"it proposed {proposal!r}: {problem}")
                elif isinstance(proposal, Scale):
                    scales.append(proposal._replace(role=Role(proposal.role)))
                else:
                    moves.append(proposal._replace(role=Role(proposal.role)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # another package's code can raise SystemExit, too
            self.fault = error
        return moves, scales

    def _begin(self, group: str, role: Role, move: Move, now_s: float) -> None:
        self._moving[move.engine] = move.role
        self._since_s[move.engine] = now_s
        swing = self._swings.setdefault(group, _Swing(dwell_s=self._dwell_s))
        towards = _direction(role, move.role)
        if swing.towards and towards == -swing.towards:
            back = now_s - swing.moved_s < 2 * swing.dwell_s
            swing.dwell_s = min(LONGEST_TURN_S, 2 * swing.dwell_s) if back else self._dwell_s
        swing.moved_s, swing.towards = now_s, towards

    def _guarded(self, member: Member, spare: Mapping[Role, bool], now_s: float) -> Member:
        """The member with those roles in `may` that it can have now."""
        moving = member.moving or member.name in self._moving
        if moving or not member.alive or self._dwells(member, now_s):
            return member._replace(moving=moving, may=frozenset([member.role]))
        able = {role for role in member.may if self._allows(member, role, spare, now_s)}
        return member._replace(may=frozenset(able | {member.role}))

    def _dwells(self, member: Member, now_s: float) -> bool:
        if member.name in self._pinned or member.role not in _TOWARDS:
            return True
        since_s = max(member.since_s, self._since_s.get(member.name, -inf))
        failed_s, failures = self._failures.get(member.name, (-inf, 0))
        again_s = failed_s + pause_s(failures, self._dwell_s)
        swing = self._swings.get(member.group)
        paused = swing is not None and now_s - swing.moved_s < self._pause_s
        return paused or now_s - since_s < self._dwell_s or now_s < again_s

    def _allows(self, member: Member, role: Role, spare: Mapping[Role, bool], now_s: float) -> bool:
        """Whether direction and minima allow this engine to have this role now."""
        if role not in _TOWARDS:
            return False
        swing, towards = self._swings.get(member.group), _direction(member.role, role)
        turns = swing is not None and towards == -swing.towards
        if swing is not None and turns and now_s - swing.moved_s < swing.dwell_s:
            return False
        after = member._replace(role=role)
        return all(spare[side] or after.on(side) or not member.on(side) for side in _SIDES)

    def _spare(self, group: Sequence[Member]) -> dict[Role, bool]:
        """For each side, whether it has more engines than its minimum."""
        return {
            side: sum(self._counts(member, side) for member in group) > self._minima[side]
            for side in _SIDES
        }

    def _counts(self, member: Member, side: Role) -> bool:
        """Whether an engine is alive on this side, and stays there."""
        return (
            member.on(side)
            and member.alive
            and not member.moving
            and member.name not in self._moving
        )

    def _repair(self, members: Iterable[Member]) -> Move | None:
        """A move to a side whose engines are all dead, or that has none."""
        alive = [member for member in members if member.alive]
        for side, other in (_SIDES, _SIDES[::-1]):
            there = (member.on(side) or self._moving.get(member.name) is side for member in alive)
            if any(there) or not self._minima[side]:
                continue
            able = [
                member
                for member in alive
                if side in member.may and member.role is other and member.name not in self._pinned
            ]
            able = [
                member for member in able if not member.moving and member.name not in self._moving
            ]
            if len(alive) > 1 and able:
                emptiest = min(
                    able, key=lambda member: (member.view.open_requests, member.view.context)
                )
                return Move(emptiest.name, side, f"no {side} engine is alive")
        return None

    def _forget(self, members: Sequence[Member], now_s: float) -> None:
        """Forget engines that left, and times that are in the future because the clock jumped back."""
        present = {member.name for member in members}
        for of_engines in (self._since_s, self._failures):
            for gone in of_engines.keys() - present:
                del of_engines[gone]
        for gone in self._moving.keys() - present:
            del self._moving[gone]
        self._repaired &= present
        for name, since_s in self._since_s.items():
            self._since_s[name] = min(since_s, now_s)
        for name, (failed_s, count) in self._failures.items():
            self._failures[name] = (min(failed_s, now_s), count)
        for swing in self._swings.values():
            swing.moved_s = min(swing.moved_s, now_s)


def _problem(move: object, engines: Sequence[str]) -> str:
    """Why a proposal has no meaning; empty if it has one."""
    if isinstance(move, Scale):
        return "no engine is started or stopped here: the policy must set `scales`, and its group have max_prefill and max_decode"
    if not isinstance(move, Move):
        return "must be a Move (scheduler_plugins/router/roles/base.py)"
    if move.engine not in engines:
        return f"engine must be one of {', '.join(engines)}"
    if move.role not in list(_TOWARDS):
        return f"role must be one of {', '.join(_TOWARDS)}"
    cause: object = move.cause
    return "" if isinstance(cause, str) else "cause must be a text"


def _scale_problem(scale: Scale, groups: Iterable[str]) -> str:
    """Why a number of engines has no meaning; empty if it has one."""
    engines: object = scale.engines
    if scale.group not in groups:
        return f"group must be one of {', '.join(sorted(groups))}"
    if scale.role not in list(_SIDES):
        return f"role must be one of {', '.join(_SIDES)}"
    if not isinstance(engines, int) or isinstance(engines, bool) or engines < 0:
        return "engines must be a whole number from 0 on"
    cause: object = scale.cause
    return "" if isinstance(cause, str) else "cause must be a text"


def _direction(before: Role, after: Role) -> int:
    """-1: towards prefill, 1: towards decode."""
    change = _TOWARDS[after] - _TOWARDS[before]
    return (change > 0) - (change < 0)
