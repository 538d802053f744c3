package com.paceline.client;

import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Optional;

/**
 * The order in which the calls of a client try its addresses, which are indexes. A call with a key begins where that
 * key's prompts are cached, unless the client has too many live calls there (AFFINITY in scheduler.proto); one without
 * begins with the next address in turn. Those that are down come last. Times are milliseconds. Safe for concurrent use.
 */
final class Rotation {
  /** How long an address that could not be reached is tried last; doubles with each further failure. */
  private static final long MIN_DOWN_MS = 1_000;

  private static final long MAX_DOWN_MS = 8_000;

  private final List<String> addresses;
  private final int[] live; // calls
  private final long[] downUntil;
  private final long[] downForMs; // 0: the address is up
  private int next;

  Rotation(List<String> addresses) {
    this.addresses = addresses;
    live = new int[addresses.size()];
    downUntil = new long[addresses.size()];
    downForMs = new long[addresses.size()];
  }

  /** All addresses. {@code key}: of {@link Affinity#key}. */
  synchronized Deque<Integer> order(long now, Optional<byte[]> key) {
    Deque<Integer> up = new ArrayDeque<>();
    Deque<Integer> down = new ArrayDeque<>();
    for (int address : key.map(this::withKey).orElseGet(this::inTurn)) {
      (isDown(address, now) ? down : up).add(address);
    }
    up.addAll(down);
    return up;
  }

  private List<Integer> withKey(byte[] key) {
    List<Integer> order = new ArrayList<>(Affinity.preference(key, addresses));
    Integer first = Affinity.choice(order, live);
    order.remove(first);
    order.add(0, first);
    return order;
  }

  private List<Integer> inTurn() {
    List<Integer> turn = new ArrayList<>();
    for (int i = 0; i < addresses.size(); i++) {
      turn.add((next + i) % addresses.size());
    }
    next = (next + 1) % addresses.size();
    return turn;
  }

  /** A call at an address begins. */
  synchronized void began(int address) {
    live[address]++;
  }

  /** It has ended. */
  synchronized void ended(int address) {
    live[address]--;
  }

  /** It has answered. */
  synchronized void up(int address) {
    downForMs[address] = 0;
  }

  /** It could not be reached, or takes no requests. Of several calls that find out, the first counts. */
  synchronized void down(int address, long now) {
    if (isDown(address, now)) {
      return;
    }
    downForMs[address] = Math.min(Math.max(2 * downForMs[address], MIN_DOWN_MS), MAX_DOWN_MS);
    downUntil[address] = now + downForMs[address];
  }

  private boolean isDown(int address, long now) {
    return downForMs[address] > 0 && downUntil[address] > now;
  }
}
