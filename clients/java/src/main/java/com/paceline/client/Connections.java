package com.paceline.client;

import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.GetModelInfoRequest;
import com.paceline.scheduler.v1.SchedulerEntry;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/**
 * Those of a client to its schedulers: to given ones from the beginning, to learned ones from their first use until they
 * are known no more and no call is there. Safe for concurrent use.
 */
final class Connections {
  private final ChannelCredentials credentials;
  private final String token;
  private final KnownSchedulers known;
  private final Rotation rotation;
  private final Map<String, Connection> open = new HashMap<>(); // by address
  private CompletableFuture<Void> lastLook = CompletableFuture.completedFuture(null); // done: it has ended
  private volatile boolean closed;

  Connections(
      List<String> given, KnownSchedulers known, ChannelCredentials credentials, String token) {
    this.credentials = credentials;
    this.token = token;
    this.known = known;
    rotation = new Rotation(given);
    for (String address : given) {
      open.put(address, Connection.given(address, credentials, token));
    }
  }

  KnownSchedulers known() {
    return known;
  }

  Rotation rotation() {
    return rotation;
  }

  static long nowMs() {
    return System.nanoTime() / 1_000_000;
  }

  boolean isClosed() {
    return closed;
  }

  /** Calls under way end, and a look in progress. */
  synchronized void close() {
    closed = true;
    open.values().forEach(Connection::close);
  }

  /** A call at a scheduler, whose connection stays open until it has ended. */
  final class Use implements AutoCloseable {
    final String address;
    final Connection connection;

    private Use(String address, Connection connection) {
      this.address = address;
      this.connection = connection;
      rotation.began(address);
    }

    @Override
    public void close() {
      synchronized (Connections.this) {
        rotation.ended(address);
        closeUnused(address);
      }
    }
  }

  /** Begins the current attempt, at a scheduler that is still known. Throws StatusRuntimeException after the end. */
  synchronized Use begin(Attempts attempts) {
    Optional<Connection> found = at(attempts.address());
    while (found.isEmpty()) {
      useKnown(); // or it may be chosen again
      attempts.skip(nowMs());
      found = at(attempts.address());
    }
    return new Use(attempts.address(), found.get());
  }

  /** Begins a call at all known schedulers, given ones first. Throws StatusRuntimeException after the end. */
  synchronized List<Use> beginAll() {
    List<Use> begun = new ArrayList<>();
    for (String address : known.addresses()) {
      at(address).ifPresent(one -> begun.add(new Use(address, one)));
    }
    return begun;
  }

  synchronized int openCount() {
    return open.size();
  }

  /** To an address, opened if there is none; no value: the address is known no more. */
  private Optional<Connection> at(String address) {
    if (closed) {
      throw Status.UNAVAILABLE.withDescription("the client is closed").asRuntimeException();
    }
    Optional<String> tlsName = known.tlsName(address);
    if (tlsName.isEmpty() && !rotation.isGiven(address)) {
      return Optional.empty();
    }
    if (!open.containsKey(address)) {
      try {
        open.put(address, Connection.learned(address, tlsName.get(), credentials, token));
      } catch (IllegalArgumentException malformed) {
        known.distrust(address);
        useKnown();
      }
    }
    return Optional.ofNullable(open.get(address));
  }

  /** Lets calls use the schedulers that are known now, and closes the connections to others that no call uses. */
  private synchronized void useKnown() {
    rotation.use(known.present());
    List.copyOf(open.keySet()).forEach(this::closeUnused);
  }

  private void closeUnused(String address) {
    if (rotation.isUnused(address)) {
      Optional.ofNullable(open.remove(address)).ifPresent(Connection::close);
    }
  }

  /** Looks into a directory beside the calls, if it is time and no look is in progress. */
  synchronized void lookInTime() {
    long now = nowMs();
    if (!closed && lastLook.isDone() && known.isTimeToLook(now, token)) {
      look(now);
    }
  }

  /** Looks into the directory of one scheduler; done when it has ended. */
  synchronized CompletableFuture<Void> look(long now) {
    String teller = known.teller(now, address -> rotation.isDown(address, now));
    at(teller).ifPresent(one -> lastLook = look(one, teller, now));
    return lastLook;
  }

  /** The one in progress, or the last one. */
  synchronized CompletableFuture<Void> lastLook() {
    return lastLook;
  }

  private CompletableFuture<Void> look(Connection connection, String teller, long now) {
    Look look = new Look();
    CompletableFuture<Void> ended =
        look.listed()
            .handle(
                (entries, error) -> {
                  learn(teller, entries, error, now);
                  return null;
                });
    Context.ROOT.run(() -> connection.watch(look)); // the caller's ends sooner
    return ended;
  }

  private void learn(String teller, List<SchedulerEntry> entries, Throwable error, long now) {
    if (error == null) {
      known.saw(teller, entries, now);
    } else {
      switch (PacelineException.of((StatusRuntimeException) error).code()) {
        case UNIMPLEMENTED -> known.hasNone(teller, now);
        case UNAVAILABLE, DEADLINE_EXCEEDED -> {
          known.lost(teller, now);
          rotation.down(teller, nowMs());
        }
        default -> known.refused(token, now);
      }
    }
    useKnown();
  }

  /** Of a stream's message: the error if it says that a learned scheduler serves another model than its entry says. */
  Optional<PacelineException> checkStarted(String address, GenerateResponse message) {
    lookInTime(); // a client that begins no calls meanwhile looks too
    return message.hasStarted()
        ? checkModel(address, message.getStarted().getModelFingerprint())
        : Optional.empty();
  }

  /** Asks a learned scheduler for its model before its first unary call: replies do not say which model answered. */
  Optional<PacelineException> check(Use use, Optional<Long> timeoutMs) {
    if (known.isChecked(use.address)) {
      return Optional.empty();
    }
    var served = use.connection.stub(timeoutMs).getModelInfo(GetModelInfoRequest.getDefaultInstance());
    return checkModel(use.address, served.getModelFingerprint());
  }

  private Optional<PacelineException> checkModel(String address, ByteString fingerprint) {
    if (known.isWhatItSays(address, fingerprint)) {
      return Optional.empty();
    }
    known.distrust(address);
    useKnown();
    return Optional.of(PacelineException.otherModel(address));
  }
}
