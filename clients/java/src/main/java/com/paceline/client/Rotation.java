package com.paceline.client;

import com.google.protobuf.ByteString;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.Deque;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.function.Predicate;

/**
 * The order in which the calls of a client try its addresses. A call with a key begins where that key's prompts are
 * cached, unless there are too many calls there (AFFINITY in scheduler.proto); one without begins with the next address
 * in turn. Those that are down come last. Times are milliseconds. Safe for concurrent use.
 */
final class Rotation {
  /** Addresses that a call tries in one round, the first ones of its order. */
  static final int MAX_TRIED = 64;

  /** Learned addresses that a call tries before a given one, at most: many dead entries hold nobody up. */
  static final int TRIED_BEFORE_GIVEN = 8;

  /** How long an address that could not be reached is tried last; doubles with each further failure. */
  private static final long MIN_DOWN_MS = 1_000;

  private static final long MAX_DOWN_MS = 8_000;

  private final Set<String> given;
  private Schedulers present;
  private Set<String> known; // addresses
  private final Map<String, Integer> live = new HashMap<>(); // the client's own calls, by address
  private final Map<String, Down> down = new HashMap<>(); // those that are, or were and have not answered since
  private int next;

  private record Down(long until, long forMs) {}

  Rotation(List<String> given) {
    this.given = Set.copyOf(given);
    use(Schedulers.of(given));
  }

  /** Says what calls try that begin from now on. */
  synchronized void use(Schedulers schedulers) {
    present = schedulers;
    known = new HashSet<>(schedulers.addresses());
    down.keySet().retainAll(known);
  }

  /**
   * The addresses that a call should try: all, up to MAX_TRIED. A call that has not begun tries foreign ones where all
   * others are down or drain.
   *
   * @param key of {@link Affinity#key}; without one: in turn
   * @param model what the request names: those that have an adapter of this name come first
   * @param begunWith the fingerprint of a stream's model, which alone can continue it; empty: none, or not known
   */
  synchronized Deque<String> order(long now, Optional<byte[]> key, String model, ByteString begunWith) {
    List<String> addresses = candidates(begunWith, now);
    boolean nobodyHas = addresses.stream().noneMatch(one -> has(one, model));
    Predicate<String> lacks = one -> !nobodyHas && !has(one, model);
    List<String> turn = new ArrayList<>(addresses);
    if (key.isPresent() && addresses.size() > 1) {
      turn = Affinity.preference(key.get(), addresses);
      List<String> takers = turn.stream().filter(one -> !lacks.test(one) && !drains(one)).toList();
      String first =
          Affinity.choice(takers.isEmpty() ? turn : takers, one -> live.getOrDefault(one, 0), this::load);
      turn.remove(first);
      turn.add(0, first);
    } else {
      int begin = next % addresses.size();
      Collections.rotate(turn, -begin);
      next = begin + 1;
    }
    turn.sort(
        Comparator.<String, Boolean>comparing(one -> isDown(one, now))
            .thenComparing(this::drains)
            .thenComparing(lacks::test));
    moveGiven(turn);
    return new ArrayDeque<>(turn.subList(0, Math.min(turn.size(), MAX_TRIED)));
  }

  /** The addresses with a call's model. */
  private List<String> candidates(ByteString begunWith, long now) {
    List<String> all = present.addresses();
    if (!begunWith.isEmpty()) {
      List<String> same =
          all.stream().filter(one -> modelAt(one).equals(begunWith) || !present.entries().containsKey(one)).toList();
      return same.isEmpty() ? all : same;
    }
    List<String> own = all.stream().filter(one -> !present.foreign().contains(one)).toList();
    return own.stream().anyMatch(one -> !isDown(one, now) && !drains(one)) ? own : all;
  }

  /** Lets at most TRIED_BEFORE_GIVEN learned addresses come before a given one. */
  private void moveGiven(List<String> turn) {
    for (int place = 0; place < turn.size(); place++) {
      if (given.contains(turn.get(place))) {
        turn.add(Math.min(place, TRIED_BEFORE_GIVEN), turn.remove(place));
        return;
      }
    }
  }

  private boolean has(String address, String adapter) {
    Learned entry = present.entries().get(address);
    return entry != null && entry.adapters().contains(adapter);
  }

  private boolean drains(String address) {
    Learned entry = present.entries().get(address);
    return entry != null && entry.drains();
  }

  private long load(String address) {
    Learned entry = present.entries().get(address);
    return entry == null ? 0 : entry.load();
  }

  /** The fingerprint of the model at an address; empty: not known. */
  synchronized ByteString modelAt(String address) {
    Learned entry = present.entries().get(address);
    return entry == null ? ByteString.EMPTY : entry.model();
  }

  /** How many addresses there are. */
  synchronized int count() {
    return known.size();
  }

  /** Whether an address is still one of them. */
  synchronized boolean has(String address) {
    return known.contains(address);
  }

  boolean isGiven(String address) {
    return given.contains(address);
  }

  /** Whether an address has another model than the present one. */
  synchronized boolean isForeign(String address) {
    return present.foreign().contains(address);
  }

  /** A call at an address begins. */
  synchronized void began(String address) {
    live.merge(address, 1, Integer::sum);
  }

  /** It has ended. */
  synchronized void ended(String address) {
    live.computeIfPresent(address, (one, calls) -> calls == 1 ? null : calls - 1);
  }

  /** Whether an address is none of them any more, and no call is there. */
  synchronized boolean isUnused(String address) {
    return !known.contains(address) && !live.containsKey(address);
  }

  /** It has answered. */
  synchronized void up(String address) {
    down.remove(address);
  }

  /** It could not be reached, or takes no requests. Of several calls that find out, the first counts. */
  synchronized void down(String address, long now) {
    if (!isDown(address, now)) {
      Down before = down.getOrDefault(address, new Down(now, 0));
      long forMs = Math.min(Math.max(2 * before.forMs, MIN_DOWN_MS), MAX_DOWN_MS);
      down.put(address, new Down(now + forMs, forMs));
    }
  }

  /** Whether it could not be reached a short while ago. */
  synchronized boolean isDown(String address, long now) {
    Down one = down.get(address);
    return one != null && one.until > now;
  }
}
