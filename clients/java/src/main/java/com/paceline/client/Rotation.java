package com.paceline.client;

import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The order in which the calls of a client try its addresses, which are indexes: each call begins with the next one in
 * turn, and those that are down come last. Times are milliseconds. Safe for concurrent use.
 */
final class Rotation {
  /** How long an address that could not be reached is tried last; doubles with each further failure. */
  private static final long MIN_DOWN_MS = 1_000;

  private static final long MAX_DOWN_MS = 8_000;

  private final long[] downUntil;
  private final long[] downForMs; // 0: the address is up
  private int next;

  Rotation(int count) {
    downUntil = new long[count];
    downForMs = new long[count];
  }

  synchronized Deque<Integer> order(long now) {
    Deque<Integer> up = new ArrayDeque<>();
    Deque<Integer> down = new ArrayDeque<>();
    for (int i = 0; i < downForMs.length; i++) {
      int address = (next + i) % downForMs.length;
      (isDown(address, now) ? down : up).add(address);
    }
    next = (next + 1) % downForMs.length;
    up.addAll(down);
    return up;
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
