"""Decide which blocks to fetch next, from which origin, and how many at once.

The fetcher reports events: a reader wants blocks, a block arrived, a request failed. `tick` returns the requests to
start now and when to call it again. The rules:

- A block is requested from the peers, if its file has any (`routed`), and otherwise or after their failure from the
  store, which is retried with growing pauses. Pace and health of both are learned (`pace`).
- A reader's block (`DEMAND`) goes first and has reserved request slots and bytes, because a blocked `read(2)` stalls
  the whole container. A queued prefetch that a reader wants is promoted; a running one counts as the reader's from then
  on, without a second request. A late one is hedged; with peers only a prefetch from the store, after the time that
  a reader's own request may take.
- Hot blocks are fetched in the recorded order, adjacent ones in one request, as long as the hot set proves its worth
  (`HotSetTrust`). Until then they give way whenever a reader waits for a block outside the hot set. A request spans
  small gaps, which cost less than another request.
- A reader's request reads ahead on fast links, where the next bytes, of which most will be needed, cost less than a
  request of their own.
- Cold blocks are fetched when hot ones are done and readers are idle.
- Running requests are limited in number and bytes.

Readers' deadlines are watched by `pending`: a read that ended is reported as `reader_cancelled`, and a block without
readers keeps only its prefetch purpose. Decides and touches nothing: simulations run it in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from heapq import heappop, heappush

from bootseer.errors import BootseerError, CorruptError, PermanentError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.ledger import ELSEWHERE, Fetch, Key, OriginQueues, Plan, Request, Wanted
from bootseer.fetch.routed import RETRY_S, Routed

# Minimum delay until the next call: a clock may not advance.
_MIN_SLEEP_S = 0.001
# A window holds several requests, so that the link stays full when one ends.
_REQUESTS_PER_WINDOW = 4
# Half of what is in flight may wait at owners for the store, whereas requests to a store all transfer data.
_PEER_WINDOWS = 2


class Scheduler(Routed):
    """The scheduler of one fetcher. `jitter` returns random numbers from 0 to 1; `now` is in seconds of one clock."""

    def __init__(self, settings: FetchSettings, jitter: Callable[[], float]) -> None:
        super().__init__(settings)
        self._jitter = jitter
        self._next_number = 0
        self._timeouts = {
            Purpose.DEMAND: settings.demand_timeout_s,
            Purpose.HOT: settings.hot_timeout_s,
            Purpose.COLD: settings.cold_timeout_s,
        }
        self._attempts = {Purpose.HOT: settings.hot_attempts, Purpose.COLD: settings.cold_attempts}
        self._hedge_credit = settings.first_hedge_credit
        self.prefetch_error: BootseerError | None = None
        """Why a prefetch was given up most recently."""

    # Events

    def note_need(self, file: int, block: int, now: float) -> None:
        """A reader needs the block for the first time, cached or not."""
        self._last_need = now
        self.trust.note_need((file, block))

    def want(self, file: int, blocks: Iterable[int], now: float) -> None:
        """A reader waits for these blocks. If it leaves before a block has arrived or was given up, the caller must
        call `reader_cancelled`. A block that had arrived before is fetched again."""
        self._last_need = now
        for block in blocks:
            if self._add_reader((file, block)):
                self._watch((file, block), now)
            if (file, block) not in self.trust:
                self.origin_of((file, block)).yield_until = now + self._settings.window_s

    def want_hot(self, blocks: Iterable[Key]) -> None:
        """Earlier startups needed these blocks, in this order."""
        for file, block in blocks:
            self.trust.add_block((file, block), self.files[file].geometry.place(block).length)
            self._add_hot((file, block))

    def fetch_all_now(self) -> None:
        """Fetch everything soon: prefetches do not wait for idle readers, and the hot set is not judged."""
        self._fetch_all_now = True

    def reader_cancelled(self, file: int, blocks: Iterable[int]) -> None:
        """A reader does not wait for these blocks any more."""
        for block in blocks:
            self._remove_reader((file, block))

    def reader_timed_out(self, file: int, blocks: Collection[int], now: float) -> None:
        """A reader reached its deadline while it waited for these blocks."""
        for origin in {id(origin): origin for origin in (self.origin_of((file, each)) for each in blocks)}.values():
            origin.pace.reader_timed_out(now)
        self.reader_cancelled(file, blocks)

    def block_arrived(self, number: int, block: int, now: float) -> None:
        """A running request brought a valid block."""
        request = self.running[number]
        self._received(request, block, now)
        if request.fetch.purpose is Purpose.DEMAND:
            self._earn_hedges(self._settings.hedge_credit)
        key = (request.fetch.file, block)
        wanted = self._detach(number, key)
        self.mark_present(*key)
        if wanted is not None:
            self.hung.update(wanted.requests)

    def claimed_elsewhere(self, number: int, block: int, now: float) -> None:
        """Another process fetches a block of this request. If it is wanted, `mark_present` or `claim_released`
        follows."""
        request = self.running[number]
        self._remove_outstanding(request, block)
        key = request.fetch.file, block
        wanted = self._detach(number, key)
        if wanted is not None and wanted.purpose is None and not wanted.requests:
            self._forget(key)  # no reader waits for it: its claim is not polled
        elif wanted is not None:
            if key not in self.claims:
                self.claims[key] = now
                wanted.requests.append(ELSEWHERE)
            wanted.tried = ()
            self._watch(key, now)

    def claim_released(self, file: int, block: int) -> None:
        """The other process stopped without fetching the block."""
        if self._detach(ELSEWHERE, (file, block)) is not None:
            del self.claims[file, block]
            self._requeue((file, block))

    def block_failed(self, number: int, block: int, error: BootseerError, now: float) -> None:
        """A running request brought an invalid block; the request goes on."""
        request = self.running[number]
        self._received(request, block, now)
        self._retry_or_give_up(request, block, error, now)

    def request_finished(self, number: int, now: float, error: BootseerError | None = None) -> None:
        """A request has ended, with `error` if it failed. Its outstanding blocks are retried."""
        request = self._end(number)
        self._peer_ended(request, now, error)
        pace = request.origin.pace
        if request.cancelled or (error is None and request.latest is None):
            pass  # aborted by us, or other processes fetch all its blocks: the origin was not asked
        elif error is None:
            pace.succeeded(request.origin.num_running + 1)
        else:
            pace.failed(error, request.started, now, self._jitter())
            self._earn_hedges(request.cost)
        for block in list(request.left):
            self._remove_outstanding(request, block)
            self._retry_or_give_up(request, block, error, now)

    # Queries

    def in_flight(self, file: int, block: int) -> bool:
        wanted = self.wanted.get((file, block))
        return wanted is not None and wanted.in_flight

    def error(self, file: int, block: int) -> BootseerError | None:
        """The error of the latest attempt for a wanted block."""
        wanted = self.wanted.get((file, block))
        return wanted.error if wanted else None

    def outage(self, file: int, until: float, now: float) -> BootseerError | None:
        """The error if no reader can get a block before `until`: all origins are down and paused for longer."""
        paces = [origin.pace for origin in self.files[file].origins]
        return paces[-1].error if all(pace.is_down(now) and pace.paused_until > until for pace in paces) else None

    # What to start

    def tick(self, now: float) -> Plan:
        """The requests to start now, and when to call again."""
        origins = list(self.origins.values())
        for origin in origins:
            while origin.postponed and origin.postponed[0][0] <= now:
                _, key = heappop(origin.postponed)
                wanted = self.wanted.get(key)
                if wanted is not None and wanted.postponed:
                    wanted.postponed = False
                    self._requeue(key)
        self._start_hedges(now)
        for origin in origins:
            self._start_demand(origin, now)
        for origin in origins:
            if origin.hot:
                self._start_prefetch(origin, Purpose.HOT, self._hot_window(origin, now), now)
        if self._cold_from(now) <= now:
            for origin in origins:
                self._start_prefetch(origin, Purpose.COLD, origin.pace.window_bytes(), now)
        plan, self.plan = self.plan, Plan()
        plan.wake_at = self._wake_at(now)
        return plan

    def _start_demand(self, origin: OriginQueues, now: float) -> None:
        if origin is not self._peers and now < origin.pace.paused_until:  # each peer has pauses of its own
            return
        for key, step in self._demand_ahead(origin, now):
            if not (self._has_demand_slot(origin) and self._may_ask(step, Purpose.DEMAND, now)):
                continue
            room = self._settings.inflight_bytes - self.inflight_bytes
            goes_along = partial(self._goes_along, origin, Purpose.DEMAND, step, now)
            # A peer may have to fetch them from the store, too.
            ahead_bytes = min(each.pace.ahead_bytes() for each in self.files[key[0]].origins)
            most_bytes, gaps = min(self._settings.demand_bytes, room), self._may_read_ahead(key, step, now)
            sizes = self._adjacent(key, most_bytes, goes_along, gaps, ahead_bytes, ahead=True)
            if sum(sizes.values()) > room and self.inflight_bytes:
                return
            self._launch(origin, key[0], sizes, Purpose.DEMAND, now, step=step)

    def _start_prefetch(self, origin: OriginQueues, purpose: Purpose, window_bytes: int, now: float) -> None:
        settings = self._settings
        if now < origin.blocked_until or not window_bytes or self._is_full(origin, window_bytes):
            return
        if origin is not self._peers and now < max(origin.pace.paused_until, origin.pace.prefetch_after):
            return
        may_bridge = purpose is Purpose.HOT and self._peers is None and not self._only_near
        gap_bytes = min(int(origin.pace.rate * settings.request_cost_s), settings.gap_bytes)
        for key, step in self._ahead(origin, purpose, now):
            if self._is_full(origin, window_bytes):
                return
            if not (self._may_ask(step, purpose, now) and self._is_next(key, purpose, origin)):
                continue
            most_bytes, room, left = self._prefetch_bytes(origin, window_bytes)
            goes_along = partial(self._goes_along, origin, purpose, step, now)
            gaps = range(self.files[key[0]].geometry.num_blocks if may_bridge else 0)
            sizes = self._adjacent(key, min(most_bytes, room), goes_along, gaps, gap_bytes)
            # A single block may always go, however small the window: an origin with a window below a block would get no
            # prefetch at all. Then only the memory limits it, and with nothing in flight not even that.
            if sum(sizes.values()) > (room if origin.num_prefetch else left) and self.inflight_bytes:
                return
            self._launch(origin, key[0], sizes, purpose, now, step=step)
        # All blocks were examined: nothing changes before a request ends, a block is queued or a route changes.
        if origin is self._peers and (purpose is Purpose.COLD or self._cold_from(now) > now):
            origin.blocked_until = now + RETRY_S

    def _prefetch_bytes(self, origin: OriginQueues, window_bytes: int) -> tuple[int, int, int]:
        """The size of a full prefetch request, and what the window and the memory have room for."""
        left = self._settings.inflight_bytes - self._settings.reserved_bytes - self.inflight_bytes
        num_windows = _PEER_WINDOWS if origin is self._peers else 1
        room = min(num_windows * window_bytes - origin.prefetch_bytes, left)
        return min(origin.next_bytes, window_bytes // _REQUESTS_PER_WINDOW), room, left

    def _is_full(self, origin: OriginQueues, window_bytes: int) -> bool:
        """Whether no prefetch can be started at this origin."""
        settings = self._settings
        if len(self.running) >= settings.max_requests:
            return True
        limit = origin.pace.limit
        if origin is self._peers:
            limit = settings.total_peer_requests - settings.reserved_peer_requests
        most_bytes, room, _ = self._prefetch_bytes(origin, window_bytes)
        is_small = room < most_bytes and origin.num_prefetch > 0  # better a full-sized request a little later
        return is_small or origin.num_running >= limit

    def _start_hedges(self, now: float) -> None:
        late = sorted((self.wanted[key].late_at, key) for key in self.demanded if self.wanted[key].late_at <= now)
        for _, key in late:
            wanted = self.wanted[key]
            if wanted.late_at > now or not self._may_hedge(wanted):  # hedged with an earlier one, or not in flight
                continue
            origin = self.origin_of(key)
            room = self._settings.inflight_bytes - self.inflight_bytes

            def eligible(other: Key, wanted: Wanted = wanted) -> bool:
                beside = self.wanted.get(other)
                return beside is not None and beside.hedges == wanted.hedges and self._may_hedge(beside)

            sizes = self._adjacent(key, min(self._settings.demand_bytes, room), eligible)
            cost = 0 if self._is_hung(wanted) else 1
            if (
                now < origin.pace.paused_until
                or self._hedge_credit < cost
                or sum(sizes.values()) > room
                or not self._has_demand_slot(origin)
            ):
                wanted.late_at = max(now + origin.pace.hedge_after_s(), origin.pace.paused_until)
                continue
            for block in sizes:
                self.wanted[key[0], block].hedges += 1
            self._hedge_credit -= cost
            self._launch(origin, key[0], sizes, Purpose.DEMAND, now, hedge=True).cost = cost

    def _may_hedge(self, wanted: Wanted) -> bool:
        if not (wanted.readers and wanted.in_flight and wanted.hedges < self._settings.max_hedges):
            return False
        if self._peers is None:
            return True
        # With peers, many nodes start together, and each would spend its hedges on the same slow store, which sent 1.1
        # to 1.5 copies; late peers are handled by their health. Only a prefetch from the store may outlast the reader.
        fetches = [request.fetch for request in self._running_for(wanted)]
        return any(fetch.step is None and fetch.purpose is not Purpose.DEMAND for fetch in fetches)

    def _is_hung(self, wanted: Wanted) -> bool:
        """Whether all requests for a block in flight hang, as far as known: for its readers a hedge is started at once,
        and costs no credit. Otherwise each block of such a request would cost one."""
        return self.hung.issuperset(wanted.requests)

    def _earn_hedges(self, credit: float) -> None:
        self._hedge_credit = min(self._hedge_credit + credit, self._settings.max_hedge_credit)

    def _has_demand_slot(self, origin: OriginQueues) -> bool:
        settings, reserved = self._settings, self._settings.reserved_requests
        limit = settings.total_peer_requests if origin is self._peers else origin.pace.limit + reserved
        return origin.num_running < limit and len(self.running) < settings.max_requests + reserved

    def _launch(
        self,
        origin: OriginQueues,
        file: int,
        sizes: dict[int, int],
        purpose: Purpose,
        now: float,
        *,
        hedge: bool = False,
        step: Hashable = None,
    ) -> Request:
        """Start a request for blocks with these stored sizes."""
        place = self.files[file].origins.index(origin)
        blocks = range(min(sizes), max(sizes) + 1)
        fetch = Fetch(self._next_number, file, blocks, purpose, hedge, self._timeouts[purpose], step)
        self._next_number += 1
        self.plan.fetches.append(fetch)
        request = self.running[fetch.number] = Request(fetch, origin, sizes, now)
        total = sum(sizes.values())
        self.inflight_bytes += total
        origin.pace.request_started(origin.num_running, now)
        origin.num_running += 1
        if purpose is not Purpose.DEMAND:
            origin.num_prefetch += 1
            origin.prefetch_bytes += total
            origin.next_bytes = min(2 * origin.next_bytes, self._settings.request_bytes)
        self.stats.requests_by_purpose[purpose] += 1
        self.stats.hedges += hedge
        if step is not None and self._peers is not None:
            self._peers.asked[step] += 1
        for block in blocks:
            key = (file, block)
            origin.demand.pop(key, None)
            wanted = self.wanted.get(key)
            if wanted is None:
                # Blocks in gaps and those read ahead are wanted by nothing: if the request fails, they are dropped.
                prefetch = Purpose.COLD if purpose is Purpose.COLD else None
                wanted = self.wanted[key] = Wanted(prefetch=prefetch, origin=place)
            wanted.requests.append(fetch.number)
            wanted.tried += () if step is None else (step,)
            if purpose is Purpose.DEMAND:
                self._watch(key, now)
        return request

    def _watch(self, key: Key, now: float) -> None:
        """A reader's block is in flight: set the time at which it is hedged."""
        wanted = self.wanted[key]
        if self._may_hedge(wanted):
            usual_s = self.origin_of(key).pace.hedge_after_s()
            after_s = usual_s if self._peers is None else self._settings.demand_timeout_s
            wanted.late_at = now + (0 if self._is_hung(wanted) else after_s * 2**wanted.hedges)

    # Prefetch

    def _hot_window(self, origin: OriginQueues, now: float) -> int:
        window_bytes = origin.pace.window_bytes()
        if self._fetch_all_now:
            return window_bytes
        # A proven set gives way to a reader only briefly: its running requests keep the link full meanwhile.
        if (not self.trust.proven or now < origin.yield_until) and self._has_uncovered(origin):
            return 0
        return self.trust.allowance(window_bytes)

    def _has_uncovered(self, origin: OriginQueues) -> bool:
        """Whether a reader waits for a block of this origin, queued or not, that is not in the hot set."""
        return any(key not in self.trust and self.origin_of(key) is origin for key in self.demanded)

    def _cold_from(self, now: float) -> float:
        """When cold blocks may be fetched, if nothing happens before."""
        if self.hot_left and not self._only_near:
            return float("inf")
        if self._fetch_all_now or self._last_need is None:
            return now
        return float("inf") if self.demanded else self._last_need + self._settings.silence_s

    # Failures

    def _retry_or_give_up(self, request: Request, block: int, error: BootseerError | None, now: float) -> None:
        """A request did not bring a block: requeue it, try the next origin, postpone it, or give it up."""
        key = (request.fetch.file, block)
        wanted = self._detach(request.fetch.number, key)
        if wanted is None:
            return
        wanted.error = error or wanted.error
        if wanted.in_flight:
            if request.fetch.hedge and wanted.readers:  # what it was to overtake may hang for longer than readers wait
                wanted.hedges -= 1
                wanted.attempts += 1
                wanted.late_at = now + self._backoff_s(wanted)
            return
        purpose = wanted.purpose
        if purpose is None or error is None:
            self._requeue(key)
            return
        if self._try_next(key, now):
            return
        wanted.attempts += 1
        wanted.corrupt += isinstance(error, CorruptError)
        if self._is_final(wanted, error, purpose):
            self._give_up(key, wanted, error)
            return
        origin = self.origin_of(key)
        if wanted.readers and origin.pace.is_down(now):
            self.plan.given_up.append((*key, error))
            while wanted.readers:
                self._remove_reader(key)
            return
        wanted.postponed = True
        heappush(origin.postponed, (max(now + self._backoff_s(wanted), origin.pace.paused_until), key))

    def _backoff_s(self, wanted: Wanted) -> float:
        """The pause before the next attempt."""
        longest_s = self._settings.backoff_s * 2.0 ** min(wanted.attempts - 1, 20)
        return min(longest_s, self._settings.max_backoff_s) * (0.5 + 0.5 * self._jitter())

    def _is_final(self, wanted: Wanted, error: BootseerError, purpose: Purpose) -> bool:
        if isinstance(error, CorruptError):
            return wanted.corrupt >= self._settings.corrupt_attempts
        max_attempts = self._attempts.get(purpose)  # none for readers: their deadlines limit the attempts
        return isinstance(error, PermanentError) or (max_attempts is not None and wanted.attempts >= max_attempts)

    def _give_up(self, key: Key, wanted: Wanted, error: BootseerError) -> None:
        if wanted.readers:
            self.plan.given_up.append((*key, error))
        if wanted.prefetch is not None:
            self.stats.dropped += 1
            self.prefetch_error = error
        self._forget(key)
        if isinstance(error, PermanentError) and not isinstance(error, CorruptError):
            self.prefetch_error = error
            self.stop_prefetch(key[0])  # its other blocks would fail too

    def _wake_at(self, now: float) -> float | None:
        times = [self.wanted[key].late_at for key in self.demanded]
        may_wait = False
        for origin in self.origins.values():
            times += [postponed[0] for postponed in origin.postponed[:1]]
            if origin.demand:
                times.append(origin.pace.paused_until)
            if origin.hot:
                times.append(origin.yield_until)
            if origin.hot or origin.cold:
                times += [origin.pace.paused_until, origin.pace.prefetch_after]
            may_wait |= bool(origin.cold)
        if may_wait:
            times.append(self._cold_from(now))
        peers = self._peers
        if peers is not None:
            queued = () if self._hot_suspended else self._hot_candidates(peers)
            hot = any(self._is_next(key, Purpose.HOT, peers) for key in queued)
            if peers.demand or hot or (peers.cold and self._cold_from(now) <= now):
                times.append(now + RETRY_S)
        times = [time for time in times if time > now and time != float("inf")]
        return max(min(times), now + _MIN_SLEEP_S) if times else None
