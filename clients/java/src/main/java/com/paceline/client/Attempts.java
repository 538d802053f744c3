package com.paceline.client;

import com.google.protobuf.ByteString;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.Deque;
import java.util.EnumSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;

/**
 * The attempts of one call. No I/O: time is passed in, in milliseconds.
 *
 * <p>A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all have
 * refused, the error is the caller's. But if one of them has no executor yet, because a model is loading, the call is
 * sent there once more and waits there. A lost attempt (the connection broke, or the scheduler ended the call
 * UNAVAILABLE in mid-stream) is repeated at once on each other address, then on all of them for up to the failover
 * timeout.
 */
final class Attempts {
  /** Between two rounds through all addresses; doubles each round, unless a scheduler gives a hint. */
  private static final long MIN_WAIT_MS = 100;

  private static final long MAX_WAIT_MS = 1_000;

  /** Losses in a row, with nothing received between them, that end a call: the call may be their cause. */
  private static final int MAX_LOSSES = 4;

  /** What a learned scheduler says to a call that a given one may take. */
  private static final Set<Status.Code> NO_LAST_WORD =
      EnumSet.of(
          Status.Code.NOT_FOUND, Status.Code.UNAUTHENTICATED, Status.Code.PERMISSION_DENIED, Status.Code.UNIMPLEMENTED);

  private static final Duration FOR_EVER = Duration.ofMillis(Long.MAX_VALUE);

  private final Rotation rotation;
  private final Optional<byte[]> key;
  private final String model; // what the request names
  private final Optional<Long> deadline;
  private final long failoverTimeoutMs;
  private Deque<String> untried;
  private String address;
  private boolean answered; // the current attempt has received a message
  private final List<PacelineException> refusals = new ArrayList<>(); // in this round through the addresses
  private Optional<Long> lostAt = Optional.empty();
  private int losses; // in a row, since the last message
  private long waitMs = MIN_WAIT_MS;
  private final long loadWaitMs;
  private ByteString begunWith = ByteString.EMPTY; // the fingerprint of the model that has sent something
  private boolean goneOver; // foreign ones were tried
  private Optional<String> loads = Optional.empty(); // address of a scheduler that had no executor yet
  private boolean waits; // the current attempt waits for its model

  /**
   * {@code key}: of {@link Affinity#key}; without one the call begins with the next address in turn. {@code model}: what
   * the request names; empty: none.
   */
  Attempts(
      Rotation rotation,
      long now,
      Optional<Duration> timeout,
      Duration failoverTimeout,
      Duration loadWait,
      Optional<byte[]> key,
      String model) {
    this.rotation = rotation;
    this.key = key;
    this.model = model;
    loadWaitMs = loadWait.toMillis();
    deadline = timeout.map(length -> now + length.toMillis());
    failoverTimeoutMs = failoverTimeout.toMillis();
    untried = order(now);
    address = untried.remove();
  }

  /** Of the current attempt. */
  String address() {
    return address;
  }

  /** Moves on from an address that is known no more. */
  void skip(long now) {
    untried.removeIf(one -> !rotation.has(one));
    if (untried.isEmpty()) {
      untried = order(now);
    }
    address = untried.remove();
  }

  /** How long the current attempt waits at its scheduler for a model that is loading; 0: not at all. */
  long loadWaitMs() {
    return waits ? loadWaitMs : 0;
  }

  /** The rest of the caller's timeout. Throws PacelineException at its end. */
  Optional<Long> timeoutMs(long now) {
    if (deadline.isPresent() && now >= deadline.get()) {
      throw new PacelineException(Status.Code.DEADLINE_EXCEEDED, "the timeout passed");
    }
    return deadline.map(end -> end - now);
  }

  /** The current attempt has received a message. {@code told}: the model's fingerprint in it; empty: it says none. */
  void answered(ByteString told) {
    if (!answered) {
      answered = true;
      rotation.up(address);
      begunWith = told.isEmpty() ? rotation.modelAt(address) : told;
    }
  }

  /**
   * The current attempt has failed: moves on to the next one, and returns the milliseconds to wait before it. Throws
   * the error for the caller if there is to be none. What a learned scheduler does not know or let in, a given one
   * decides.
   *
   * @param reached whether the attempt was sent on an established connection
   */
  long failed(PacelineException error, boolean reached, long now) {
    if (error.code() == Status.Code.UNAVAILABLE) {
      rotation.down(address, now);
    }
    if (isLost(error, reached)) {
      lose(error, now);
    } else if (lostAt.isPresent() && error.code() == Status.Code.ALREADY_EXISTS) {
      // The lost attempt: its scheduler has not noticed yet that we are gone.
    } else if (error.isRetryable() && !answered) {
      refusals.add(error);
      if (error.reason().equals("NOT_READY") && loads.isEmpty()) {
        loads = Optional.of(address);
      }
    } else if (isNoLastWord(error)) {
      List<String> rest = new ArrayList<>(untried);
      rest.sort(Comparator.comparing(one -> !rotation.isGiven(one)));
      untried = new ArrayDeque<>(rest);
    } else {
      throw error;
    }
    answered = false;
    untried.removeIf(one -> !rotation.has(one));
    if (untried.isEmpty() && !goneOver) { // all others are down or drain
      goneOver = true;
      untried = order(now);
      untried.removeIf(one -> !rotation.isForeign(one));
    }
    if (untried.isEmpty()) {
      return nextRound(error, now);
    }
    address = untried.remove();
    return 0;
  }

  private Deque<String> order(long now) {
    return rotation.order(now, key, model, begunWith);
  }

  /** Whether a learned scheduler refused what a given one may take. */
  private boolean isNoLastWord(PacelineException error) {
    return !answered && !rotation.isGiven(address) && NO_LAST_WORD.contains(error.code());
  }

  /** Whether the connection broke, or the scheduler ended, when it may have taken the call. */
  private boolean isLost(PacelineException error, boolean reached) {
    if (error.code() != Status.Code.UNAVAILABLE) {
      return false;
    }
    boolean byGrpc = error.reason().isEmpty() && error.retryAfter().isEmpty();
    return answered || byGrpc && reached;
  }

  private void lose(PacelineException error, long now) {
    losses = answered ? 1 : losses + 1;
    if (losses >= MAX_LOSSES) {
      throw error;
    }
    if (!answered && lostAt.isPresent()) {
      return;
    }
    lostAt = Optional.of(now);
    waitMs = MIN_WAIT_MS;
    refusals.clear();
    untried = order(now);
    untried.remove(address);
  }

  private long nextRound(PacelineException error, long now) {
    PacelineException forCaller =
        refusals.stream().min(Comparator.comparing(one -> one.retryAfter().orElse(FOR_EVER))).orElse(error);
    if (lostAt.isEmpty() && loads.filter(rotation::has).isPresent() && !waits && loadWaitMs > 0) {
      address = loads.get();
      refusals.clear();
      waits = true;
      return 0;
    }
    long leftMs = lostAt.map(since -> since + failoverTimeoutMs - now).orElse(0L);
    if (leftMs <= 0) {
      throw forCaller;
    }
    Optional<Duration> hint = refusals.isEmpty() ? Optional.empty() : forCaller.retryAfter();
    long wait = Math.min(hint.map(delay -> Math.max(delay.toMillis(), MIN_WAIT_MS)).orElse(waitMs), leftMs);
    waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
    refusals.clear();
    untried = order(now);
    address = untried.remove();
    return deadline.isPresent() ? Math.min(wait, Math.max(0, deadline.get() - now)) : wait;
  }
}
