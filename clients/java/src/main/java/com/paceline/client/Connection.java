package com.paceline.client;

import com.paceline.scheduler.v1.SchedulerServiceGrpc;
import com.paceline.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import io.grpc.ChannelCredentials;
import io.grpc.ConnectivityState;
import io.grpc.Grpc;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.stub.MetadataUtils;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** The channel to one scheduler. */
final class Connection {
  /**
   * How long connecting may take: a frozen scheduler accepts connections and sends nothing. A JVM that has just started
   * needs much of it to load classes.
   */
  private static final long CONNECT_TIMEOUT_MS = 5_000;

  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private static final Metadata.Key<String> WAIT =
      Metadata.Key.of("paceline-wait-ms", Metadata.ASCII_STRING_MARSHALLER);

  private final ManagedChannel channel;
  private final SchedulerServiceBlockingStub stub;

  Connection(String address, ChannelCredentials credentials, String token) {
    channel =
        Grpc.newChannelBuilder(address, credentials)
            // A frozen scheduler keeps its sockets open. gRPC for Java pings every 10 s at most.
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(1_500, TimeUnit.MILLISECONDS)
            .maxInboundMessageSize(4 << 20)
            .userAgent("paceline-java")
            .build();
    SchedulerServiceBlockingStub plain = SchedulerServiceGrpc.newBlockingStub(channel);
    if (token.isEmpty()) {
      stub = plain;
    } else {
      // Plain metadata instead of gRPC's call credentials, which refuse plaintext: a token is useful on loopback too.
      Metadata headers = new Metadata();
      headers.put(AUTHORIZATION, "Bearer " + token);
      stub = plain.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
    }
  }

  /** For one call. */
  SchedulerServiceBlockingStub stub(Optional<Long> timeoutMs) {
    return timeoutMs.map(time -> stub.withDeadlineAfter(time, TimeUnit.MILLISECONDS)).orElse(stub);
  }

  /** For one call that waits at the scheduler for a model that is loading; 0: it does not. */
  SchedulerServiceBlockingStub stub(Optional<Long> timeoutMs, long loadWaitMs) {
    if (loadWaitMs <= 0) {
      return stub(timeoutMs);
    }
    Metadata headers = new Metadata();
    headers.put(WAIT, Long.toString(loadWaitMs));
    return stub(timeoutMs).withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  /**
   * Waits until the channel is connected, or known not to be. False: a call would fail at once, with the reason.
   * Throws StatusRuntimeException if connecting takes too long, or the call's timeout passes.
   */
  boolean connect(Optional<Long> timeoutMs) {
    boolean isShort = timeoutMs.isPresent() && timeoutMs.get() < CONNECT_TIMEOUT_MS;
    long deadline =
        System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(isShort ? timeoutMs.get() : CONNECT_TIMEOUT_MS);
    for (; ; ) {
      ConnectivityState state = channel.getState(true);
      switch (state) {
        case READY:
          return true;
        case TRANSIENT_FAILURE:
          channel.resetConnectBackoff(); // for the attempt after this one
          return false;
        case SHUTDOWN:
          return false;
        default:
          if (!awaitChange(state, deadline - System.nanoTime())) {
            Status why = isShort ? Status.DEADLINE_EXCEEDED : Status.UNAVAILABLE;
            throw why.withDescription("no connection established in time").asRuntimeException();
          }
      }
    }
  }

  void close() {
    channel.shutdownNow();
  }

  private boolean awaitChange(ConnectivityState state, long nanos) {
    CountDownLatch changed = new CountDownLatch(1);
    channel.notifyWhenStateChanged(state, changed::countDown);
    try {
      return changed.await(nanos, TimeUnit.NANOSECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Status.CANCELLED.withDescription("the thread was interrupted").asRuntimeException();
    }
  }
}
