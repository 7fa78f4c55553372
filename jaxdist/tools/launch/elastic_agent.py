"""Elastic jobs: continue on the hosts and GPUs that are available, and grow when more return.

jax cannot add or remove a process while a job runs, so a change of membership is a restart from the
newest checkpoint. The job runs in rounds of fixed membership. One agent runs in each host's
launcher; it decides when a round ends and which hosts take part in the next. Agents see each other
only through the files of `rendezvous`.

1. The agent with the lowest live rank leads. All state is in the files, so the next rank replaces a
   lost leader without an election.
2. The leader waits for all hosts, for at most `rdzv_timeout_s`. It chooses the largest legal job
   (`membership.choose_members`) and writes the round.
3. Each member reads the round and starts its processes. The other hosts wait as spares.
4. The round ends in one of three ways:

       all processes have ended     exit code 0: the job is done. Others: see `supervisor`
       a member is lost             its heartbeat stops. The processes of the others wait for it in
                                    a collective and cannot save, so they are killed
       a larger job is possible     the leader writes `stop` into the round. The members save, exit
                                    with 75 and join the next round

After the processes of a member have failed, the others run on for `heartbeat_timeout_s` before they
are killed: they notice the failure within seconds, and their own reports name the cause better.
"""

from __future__ import annotations

import dataclasses
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from jaxdist import runtime
from jaxdist.settings import ConfigError
from jaxdist.tools.launch import log
from jaxdist.tools.launch.membership import ElasticConfig, LegalSizes, choose_members
from jaxdist.tools.launch.rendezvous import HEARTBEAT_S, Host, Membership, Rendezvous, Round
from jaxdist.tools.launch.resources import Capacity, capacity, first_gpus, free_port
from jaxdist.tools.launch.worker_group import GroupResult, Placement, WorkerGroup

_POLL_S = 0.3


class ElasticAgent:
    """Chooses the placements of an elastic job, for one of its hosts.

    With `stop_reaches_all` the processes forward a stop request to each other, as jaxdist.train
    does. `write` prints a line on the console.
    """

    def __init__(
        self,
        plan: ElasticConfig,
        rendezvous: Rendezvous,
        sizes: LegalSizes,
        *,
        stop_reaches_all: bool,
        write: Callable[[str], None] = log,
    ):
        self.plan, self.rendezvous, self.sizes = plan, rendezvous, sizes
        self.round: Round | None = None  # the last round of this host
        self._stop_reaches_all = stop_reaches_all
        self._log = write
        self._last_message = ""
        self._had_gpus = False
        self._newest: Round | None = None  # round in round.json, and time of its first read
        self._newest_since = 0.0
        self._idle_since: float | None = None  # when this host last became an idle leader
        self._ended_since: dict[int, float] = {}
        self._next_watch_s = 0.0
        self._next_capacity_s = 0.0
        self._has_forwarded_stop = False

    def next_placement(self, stop_signal: Callable[[], int]) -> tuple[int, Placement] | int:
        """Wait for a round with this host; return its number and placement, or an exit code.

        The code is that of a job that has ended, 75 if the present hosts cannot run it, or 75 or
        130 after a stop request.
        """
        if not self.rendezvous.own.heartbeat:
            _reject_duplicate(self.rendezvous.claim_rank())
        self.offer_host()
        while not stop_signal():
            if self.rendezvous.clock() >= self._next_capacity_s:
                self._offer()
            result = self.poll()
            if isinstance(result, Round):
                return result.number, self.join_round(result)
            if result is not None:
                return result
            time.sleep(_POLL_S)
        return (
            runtime.EXIT_INTERRUPTED if stop_signal() == signal.SIGINT else runtime.EXIT_PREEMPTED
        )

    def offer_host(self) -> None:
        """Publish that this host waits for a round, and its capacity."""
        self._idle_since, self._last_message = None, ""
        self._offer()

    def poll(self) -> Round | int | None:
        """Read the files once; return a new round with this host, or the job's exit code.

        None = poll again. The host with the lowest live rank leads.
        """
        hosts = self.rendezvous.read_hosts()
        if self.round is None:
            _reject_duplicate(self.rendezvous.duplicate)
        current = self._current_round()
        code = self._exit_code_of_job(hosts, current)
        if code is not None:
            return code
        is_new = current is not None and (self.round is None or current.id != self.round.id)
        if current and is_new and current.index_of(self.rendezvous.own.uuid) is not None:
            return current
        if self._leads():
            return self._lead(hosts, current)
        self._log_waiting(current, hosts)
        return None

    def join_round(self, new: Round) -> Placement:
        """Publish that this host runs a round; return its processes' placement."""
        self.round, self._has_forwarded_stop, self._ended_since = new, False, {}
        self._next_watch_s = self.rendezvous.clock() + HEARTBEAT_S
        self.rendezvous.publish(state="running", round=new.id)
        me = self.rendezvous.own
        index = new.index_of(me.uuid)
        assert index is not None  # `poll` returns only such rounds
        first = new.members[0]
        address = "127.0.0.1" if len(new.members) == 1 else first.address
        visible = ""
        if me.gpus and new.nproc_per_node * new.devices < me.devices:
            visible = first_gpus(new.nproc_per_node * new.devices)
        return Placement(
            nproc_per_node=new.nproc_per_node,
            nnodes=len(new.members),
            node_rank=index,
            coordinator_address=f"{address}:{first.port}",
            num_hosts=len({host.address for host in new.members}),
            visible_gpus=visible,
            token=new.id,
        )

    def watch(self, group: WorkerGroup) -> None:
        """Once a second: lead if due; kill the processes after a loss, or forward a stop."""
        now = self.rendezvous.clock()
        if now < self._next_watch_s:
            return
        self._next_watch_s = now + HEARTBEAT_S
        has_stop_request = group.is_stopping and not self._has_forwarded_stop
        if has_stop_request and self.rendezvous.own.state == "running":
            self.rendezvous.publish(state="leaving")
        if now >= self._next_capacity_s:
            self.rendezvous.publish(self._capacity_now())
        hosts, current = self.rendezvous.read_hosts(), self._current_round()
        lost = self._missing_member(hosts, current, group.is_stopping)
        is_current = self.round is not None and current is not None and current.id == self.round.id
        if is_current and self._leads():
            self._lead(hosts, current)
        if lost:
            group.abort(lost)
            return
        self._forward_stop(group, hosts, current)

    def on_group_end(self, result: GroupResult) -> None:
        """Publish how this host's processes ended; a leaving host only if they finished."""
        ends = {runtime.EXIT_OK: "done", runtime.EXIT_PREEMPTED: "saved"}
        if self.rendezvous.own.state == "running" or result.exit_code == runtime.EXIT_OK:
            self.rendezvous.publish(state=ends.get(result.exit_code, "failed"))

    def all_hosts_done(self, stop_signal: Callable[[], int]) -> bool:
        """Wait for members that still run; return whether all ended with 0; True after a stop."""
        assert self.round is not None  # a round has ended
        while not stop_signal():
            hosts = self.rendezvous.read_hosts()
            states = [self._state_in(self.round, hosts, host) for host in self.round.members]
            if all(state == "done" for state in states):
                break
            if not any(state == "running" for state in states):
                return False
            time.sleep(_POLL_S)
        return True

    def continues_after_save(self) -> bool:
        """Return whether another round follows a save that was not requested on this host.

        It does if the leader or another member requested the save. A single host was preempted
        itself, e.g. at its time limit.
        """
        assert self.round is not None  # a round has ended
        current = self._current_round() or self.round
        return current.id != self.round.id or bool(current.stop) or len(current.members) > 1

    def close(self, code: int, stop_signal: int) -> None:
        """Stop the heartbeats; publish that this host leaves or ends the job on all, if it does."""
        if not self.rendezvous.own.heartbeat or self.rendezvous.duplicate is not None:
            self.rendezvous.stop_heartbeat()
        elif code == runtime.EXIT_OK:
            self.rendezvous.close()
        elif stop_signal or code == runtime.EXIT_PREEMPTED:
            self.rendezvous.close(state="left")
        else:
            self.rendezvous.close(state="ended", code=code)

    def discard(self) -> None:
        """Restore the rendezvous files to their state before this launch; see `Rendezvous`."""
        self.rendezvous.discard()

    def _leads(self) -> bool:
        return self.rendezvous.leader() == self.rendezvous.own.rank

    def _lead(self, hosts: Mapping[int, Host], current: Round | None) -> int | None:
        """Write the next round when hosts are complete or late; end one after a loss or to grow.

        Return the job's exit code if, after `rdzv_timeout_s`, the hosts cannot run it; else None.
        """
        living = [h for h in hosts.values() if self.rendezvous.is_alive(h)]
        if current is not None and self._is_running(current, hosts):
            self._idle_since = None
            self._log_waiting(current, hosts)
            lost = [m for m in current.members if self._state_in(current, hosts, m) == "lost"]
            if lost and not current.lost:  # other hosts read the files of members rarely
                loss = self._loss(lost[0], hosts)
                self.rendezvous.write_round(dataclasses.replace(current, lost=loss))
                return None
            self._stop_to_grow(current, [h for h in living if h.state in ("waiting", "running")])
            return None
        now = self.rendezvous.clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        waiting = [h for h in living if h.state == "waiting"]
        is_late = now >= self._idle_since + self.plan.rdzv_timeout_s
        choice = None
        if is_late or len(waiting) >= self.plan.nnodes.maximum:
            choice = choose_members(waiting, self.plan, self.sizes)
        if choice is not None:
            self._start_round(choice, -1 if current is None else current.number)
        elif is_late:
            return self._give_up(waiting)
        else:
            self._log_waiting(None, hosts)
        return None

    def _start_round(self, choice: Membership, last_number: int) -> None:
        new = Round(**vars(choice), id=uuid.uuid4().hex, number=last_number + 1)
        self.rendezvous.write_round(new)
        missing = self.plan.nnodes.maximum - len(new.members)
        short = f", {missing} short of {self.plan.nnodes.maximum}" if missing else ""
        self._log(
            f"round {new.number}: {', '.join(map(str, new.members))}{short}; processes on each: "
            f"{new.nproc_per_node}, total devices: {new.num_devices}"
        )

    def _stop_to_grow(self, current: Round, present: Sequence[Host]) -> None:
        choice = choose_members(present, self.plan, self.sizes)
        if current.stop or choice is None or choice.num_devices <= current.num_devices:
            return
        stop = (
            f"{choice.num_devices} devices can be used, round {current.number} uses "
            f"{current.num_devices}"
        )
        self.rendezvous.write_round(dataclasses.replace(current, stop=stop))

    def _give_up(self, waiting: Sequence[Host]) -> int:
        present = ", ".join(f"{h.devices} on {h}" for h in waiting)
        legal = "" if self.sizes.legal is None else f"; legal device counts: {self.sizes.legal}"
        self._log(
            f"after {self.plan.rdzv_timeout_s:g} s the hosts present cannot run a job of "
            f"--nnodes {self.plan.nnodes} × --nproc-per-node {self.plan.nproc_per_node}{legal}. "
            f"Devices: {present}. Run the same command again when more are back, or with "
            "a smaller MIN or mesh"
        )
        return runtime.EXIT_PREEMPTED

    def _current_round(self) -> Round | None:
        current = self.rendezvous.read_round()
        if current is None:  # round.json cannot be read now
            return self._newest
        if self._newest is None or current.id != self._newest.id:
            self._newest_since = self.rendezvous.clock()
        self._newest = current
        return current

    def _is_running(self, current: Round, hosts: Mapping[int, Host]) -> bool:
        return any(self._state_in(current, hosts, host) == "running" for host in current.members)

    def _state_in(self, current: Round, hosts: Mapping[int, Host], member: Host) -> str:
        """Return `running`, `lost`, or the state since the member ended the round."""
        host = hosts.get(member.rank)
        if host is None or host.uuid != member.uuid:
            return "lost"
        if host.round != current.id:  # the host has not read the round yet, and may never do so
            read_at = self.rendezvous.read_at(host)
            fresh = read_at < self._newest_since + self.plan.rdzv_timeout_s
            return "running" if fresh and self.rendezvous.is_alive(host) else "lost"
        if host.state in ("running", "leaving"):
            return "running" if self.rendezvous.is_alive(host) else "lost"
        return host.state

    def _exit_code_of_job(self, hosts: Mapping[int, Host], current: Round | None) -> int | None:
        """Return the job's exit code if a member has ended it, or all are done; else None."""
        if current is None:
            return None
        for member in current.members:
            host = hosts.get(member.rank)
            if host is not None and host.uuid == member.uuid and host.state == "ended":
                self._log(f"{host} has ended the job with exit code {host.code}")
                return host.code
        states = [self._state_in(current, hosts, member) for member in current.members]
        if all(state == "done" for state in states):
            self._log(f"the job was completed by {', '.join(map(str, current.members))}")
            return runtime.EXIT_OK
        return None

    def _missing_member(
        self, hosts: Mapping[int, Host], current: Round | None, is_stopping: bool
    ) -> str:
        """Return why this host's processes must be killed, e.g. a lost member; else ""."""
        assert self.round is not None  # a round runs
        if current is None or current.id != self.round.id:
            return f"the other hosts have started a round without {self.rendezvous.own}"
        if current.lost:
            return current.lost
        for member in self.round.members:
            state = self._state_in(self.round, hosts, member)
            if state == "lost":
                return self._loss(member, hosts)
            if state in ("running", "done"):
                continue
            now = self.rendezvous.clock()
            since = self._ended_since.setdefault(member.rank, now)
            if now > since + self.plan.heartbeat_timeout_s and not is_stopping:
                return f"{member} has ended its part of the round ({state})"
        return ""

    def _loss(self, member: Host, hosts: Mapping[int, Host]) -> str:
        host = hosts.get(member.rank)
        if host is not None and host.uuid != member.uuid:
            return f"{member} is lost: its launcher was restarted"
        return (
            f"{member} is lost: no heartbeat for {self.plan.heartbeat_timeout_s:g} s (power "
            "failure, network, or its launcher was killed), or it did not join the round"
        )

    def _forward_stop(
        self, group: WorkerGroup, hosts: Mapping[int, Host], current: Round | None
    ) -> None:
        assert self.round is not None and current is not None  # else it was aborted
        if group.is_stopping:
            return
        members = [m for m in self.round.members if m.rank in hosts]
        if current.stop:
            # If processes forward the request, one host is enough. A second signal could kill a
            # process that has saved and is about to exit.
            state_of = lambda member: self._state_in(current, hosts, member)
            first = min(member.rank for member in members if state_of(member) == "running")
            if self._stop_reaches_all and first != self.rendezvous.own.rank:
                return
            self._log(f"stopping the processes, which save before the next round: {current.stop}")
        elif self._stop_reaches_all or not any(
            hosts[member.rank].state in ("leaving", "saved") for member in members
        ):
            return
        self._has_forwarded_stop = True
        group.request_stop()

    def _offer(self) -> None:
        # State and capacity in one write: a leader must not see "waiting" without the capacity.
        self.rendezvous.publish(self._capacity_now(), state="waiting", port=free_port(""))

    def _capacity_now(self) -> Capacity:
        most, before = self.plan.nproc_per_node.maximum, self.rendezvous.own
        now = capacity(most, self.sizes.simulate, had_gpus=self._had_gpus)
        self._had_gpus |= now.gpus
        self._next_capacity_s = self.rendezvous.clock() + self.plan.grow_interval_s
        if now.devices != before.devices and self.round is not None:
            self._log(f"{now.devices} devices are available, {before.devices} before")
        return now

    def _log_waiting(self, current: Round | None, hosts: Mapping[int, Host]) -> None:
        me, plan = self.rendezvous.own, self.plan
        if me.state != "waiting":
            return
        if current is not None and self._is_running(current, hosts):
            running = [h for h in current.members if self._state_in(current, hosts, h) == "running"]
            text = f"round {current.number} runs on {', '.join(map(str, running))}: {me} waits "
            # A member waits here after its own processes have ended.
            is_member = current.index_of(me.uuid) is not None
            text += "until they end, for the next round" if is_member else "as a spare"
        else:
            text = (
                f"{me} waits up to {plan.rdzv_timeout_s:g} s for --nnodes {plan.nnodes} × "
                f"--nproc-per-node {plan.nproc_per_node}"
            )
        if text != self._last_message:
            self._log(text)
        self._last_message = text


def _reject_duplicate(duplicate: Host | None) -> None:
    if duplicate is not None:
        raise ConfigError(
            f"--node-rank {duplicate.rank} is used by a running launcher on "
            f"{duplicate.address}. Use another rank on each host, or end that launcher first."
        )
