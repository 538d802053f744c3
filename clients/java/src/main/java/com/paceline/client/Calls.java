package com.paceline.client;

import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import com.paceline.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceFutureStub;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Function;

/** A client's calls: on one scheduler after the other until one takes it, or on all at once. */
final class Calls {
  private final Connections connections;
  private final Duration failoverTimeout;

  Calls(Connections connections, Duration failoverTimeout) {
    this.connections = connections;
    this.failoverTimeout = failoverTimeout;
  }

  /** Of a call that generates and begins now. */
  Attempts attempts(GenerateRequest request, Duration timeout, String affinityKey) {
    boolean hasChoice = connections.rotation().count() > 1;
    Optional<byte[]> key = hasChoice ? Optional.of(Affinity.key(request, affinityKey)) : Optional.empty();
    return attempts(timeout, failoverTimeout, request.getModel(), key);
  }

  private Attempts attempts(Duration timeout, Duration failover, String model, Optional<byte[]> key) {
    connections.lookInTime();
    Optional<Duration> limit = Optional.ofNullable(timeout);
    return new Attempts(
        connections.rotation(), Connections.nowMs(), limit, failover, failoverTimeout, key, model);
  }

  /** A unary call that is sent again when its scheduler dies. {@code model}: what the request names. */
  <T> T safely(Duration timeout, String model, Function<SchedulerServiceBlockingStub, T> send) {
    return on(attempts(timeout, failoverTimeout, model, Optional.empty()), send);
  }

  /** One that is not. */
  <T> T once(Duration timeout, String model, Function<SchedulerServiceBlockingStub, T> send) {
    return on(attempts(timeout, Duration.ZERO, model, Optional.empty()), send);
  }

  /** Sends a unary call until a scheduler answers it. */
  <T> T on(Attempts attempts, Function<SchedulerServiceBlockingStub, T> send) {
    for (; ; ) {
      boolean reached = false;
      PacelineException failure;
      try (Connections.Use use = connections.begin(attempts)) {
        reached = use.connection.connect(attempts.timeoutMs(Connections.nowMs()));
        Optional<PacelineException> lie = connections.check(use, attempts.timeoutMs(Connections.nowMs()));
        if (lie.isEmpty()) {
          Optional<Long> left = attempts.timeoutMs(Connections.nowMs());
          T reply = send.apply(use.connection.stub(left, attempts.loadWaitMs()));
          attempts.answered(ByteString.EMPTY);
          return reply;
        }
        failure = lie.get();
      } catch (StatusRuntimeException error) {
        failure = PacelineException.of(error);
      }
      if (Thread.currentThread().isInterrupted()) {
        throw interrupted();
      }
      long waitMs = attempts.failed(failure, reached, Connections.nowMs());
      if (connections.isClosed()) {
        throw failure;
      }
      sleep(waitMs);
    }
  }

  /**
   * The replies of those that answer, of all schedulers at once. Throws the first error if none does, a given
   * scheduler's sooner than a learned one's.
   */
  <T> List<T> onAll(Duration timeout, Function<SchedulerServiceFutureStub, ? extends Future<T>> send) {
    connections.lookInTime();
    Optional<Long> end = Optional.ofNullable(timeout).map(length -> Connections.nowMs() + length.toMillis());
    awaitFirstLook(left(end));
    List<Connections.Use> begun = List.of();
    List<Future<T>> replies = new ArrayList<>();
    try {
      begun = connections.beginAll();
      begun.forEach(use -> use.connection.wake());
      long connected = Connections.nowMs() + Connection.CONNECT_TIMEOUT_MS; // of all together
      for (Connections.Use use : begun) {
        replies.add(sent(use.connection, end, connected, send));
      }
      return received(replies);
    } catch (StatusRuntimeException ended) {
      throw PacelineException.of(ended);
    } finally {
      replies.forEach(one -> one.cancel(true));
      begun.forEach(Connections.Use::close);
    }
  }

  private static <T> Future<T> sent(
      Connection connection,
      Optional<Long> end,
      long connected,
      Function<SchedulerServiceFutureStub, ? extends Future<T>> send) {
    try {
      connection.connect(left(end), Math.max(connected - Connections.nowMs(), 0));
      return send.apply(connection.futureStub(left(end)));
    } catch (StatusRuntimeException error) {
      return CompletableFuture.failedFuture(error);
    }
  }

  private static Optional<Long> left(Optional<Long> end) {
    return end.map(time -> Math.max(time - Connections.nowMs(), 0));
  }

  private static <T> List<T> received(List<Future<T>> begun) {
    List<T> replies = new ArrayList<>();
    List<PacelineException> failures = new ArrayList<>();
    for (Future<T> one : begun) {
      try {
        replies.add(one.get());
      } catch (ExecutionException failed) {
        failures.add(PacelineException.of((StatusRuntimeException) failed.getCause()));
      } catch (InterruptedException interrupted) {
        Thread.currentThread().interrupt();
        throw interrupted();
      }
    }
    if (replies.isEmpty()) {
      throw failures.get(0);
    }
    return replies;
  }

  /** Before a call to all, if none has ended: for at most half of the time that the call has. */
  private void awaitFirstLook(Optional<Long> timeoutMs) {
    long limitMs = Math.min(timeoutMs.map(left -> left / 2).orElse(Look.TIMEOUT_MS), Look.TIMEOUT_MS);
    try {
      if (!connections.known().hasLooked()) {
        connections.lastLook().get(limitMs, TimeUnit.MILLISECONDS);
      }
    } catch (TimeoutException | ExecutionException later) {
      // The call goes to those that are known.
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw interrupted();
    }
  }

  private static PacelineException interrupted() {
    return new PacelineException(Status.Code.CANCELLED, "the thread was interrupted");
  }

  private static void sleep(long ms) {
    try {
      Thread.sleep(ms);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw interrupted();
    }
  }
}
