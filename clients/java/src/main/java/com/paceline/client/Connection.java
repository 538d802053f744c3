package com.paceline.client;

import com.paceline.scheduler.v1.SchedulerServiceGrpc;
import com.paceline.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import com.paceline.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceFutureStub;
import com.paceline.scheduler.v1.WatchSchedulersRequest;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptors;
import io.grpc.ConnectivityState;
import io.grpc.Grpc;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import java.net.URI;
import java.net.URISyntaxException;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** The channel to one scheduler. */
final class Connection {
  /**
   * How long connecting may take: a frozen scheduler accepts connections and sends nothing. A JVM that has just started
   * needs much of it to load classes.
   */
  static final long CONNECT_TIMEOUT_MS = 5_000;

  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private static final Metadata.Key<String> WAIT =
      Metadata.Key.of("paceline-wait-ms", Metadata.ASCII_STRING_MARSHALLER);

  private static final int MAX_PORT = 0xffff;

  private final ManagedChannel channel;
  private final Channel authorized; // adds the token to calls

  private Connection(ManagedChannelBuilder<?> builder, String token) {
    channel =
        builder
            // A frozen scheduler keeps its sockets open. gRPC for Java pings every 10 s at most.
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(1_500, TimeUnit.MILLISECONDS)
            .maxInboundMessageSize(4 << 20)
            .userAgent("paceline-java")
            .build();
    // Plain metadata instead of gRPC's call credentials, which refuse plaintext: a token is useful on loopback too.
    Metadata headers = new Metadata();
    if (!token.isEmpty()) {
      headers.put(AUTHORIZATION, "Bearer " + token);
    }
    authorized = ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  /** To an address given by the user. */
  static Connection given(String address, ChannelCredentials credentials, String token) {
    return new Connection(Grpc.newChannelBuilder(address, credentials), token);
  }

  /**
   * To host:port of a directory, whose certificate has this name; empty: without TLS.
   *
   * @throws IllegalArgumentException if one of them can't be such
   */
  static Connection learned(String address, String tlsName, ChannelCredentials credentials, String token) {
    if (Integer.parseInt(address.substring(address.lastIndexOf(':') + 1)) > MAX_PORT) {
      throw new IllegalArgumentException(address); // gRPC would try it for ever
    }
    try {
      String target = new URI("dns", "", "/" + address, null).toString(); // no part of the address is a scheme
      ManagedChannelBuilder<?> builder = Grpc.newChannelBuilder(target, credentials);
      return new Connection(tlsName.isEmpty() ? builder : builder.overrideAuthority(tlsName), token);
    } catch (URISyntaxException malformed) {
      throw new IllegalArgumentException(malformed);
    }
  }

  /** For one call. */
  SchedulerServiceBlockingStub stub(Optional<Long> timeoutMs) {
    return limited(SchedulerServiceGrpc.newBlockingStub(authorized), timeoutMs);
  }

  /** For one call that goes on beside others. */
  SchedulerServiceFutureStub futureStub(Optional<Long> timeoutMs) {
    return limited(SchedulerServiceGrpc.newFutureStub(authorized), timeoutMs);
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

  /** Begins to look into the scheduler's directory. */
  void watch(Look look) {
    if (channel.getState(true) == ConnectivityState.TRANSIENT_FAILURE) {
      channel.resetConnectBackoff();
    }
    limited(SchedulerServiceGrpc.newStub(authorized), Optional.of(Look.TIMEOUT_MS))
        .withMaxInboundMessageSize(Look.MAX_MESSAGE_BYTES)
        .watchSchedulers(WatchSchedulersRequest.getDefaultInstance(), look);
  }

  /** Begins to connect, if it is not connected. */
  void wake() {
    channel.getState(true);
  }

  /**
   * Waits until the channel is connected, or known not to be. False: a call would fail at once, with the reason.
   * Throws StatusRuntimeException if connecting takes too long, or the call's timeout passes.
   */
  boolean connect(Optional<Long> timeoutMs) {
    return connect(timeoutMs, CONNECT_TIMEOUT_MS);
  }

  /** The same, with so much time to connect. */
  boolean connect(Optional<Long> timeoutMs, long connectMs) {
    boolean isShort = timeoutMs.isPresent() && timeoutMs.get() < connectMs;
    long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(isShort ? timeoutMs.get() : connectMs);
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

  private static <S extends AbstractStub<S>> S limited(S stub, Optional<Long> timeoutMs) {
    return timeoutMs.map(time -> stub.withDeadlineAfter(time, TimeUnit.MILLISECONDS)).orElse(stub);
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
