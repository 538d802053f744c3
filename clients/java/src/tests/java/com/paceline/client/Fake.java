package com.paceline.client;

import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.AbortRequest;
import com.paceline.scheduler.v1.AbortResponse;
import com.paceline.scheduler.v1.Continuation;
import com.paceline.scheduler.v1.Delta;
import com.paceline.scheduler.v1.Finished;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.GenerateUnaryRequest;
import com.paceline.scheduler.v1.GenerateUnaryResponse;
import com.paceline.scheduler.v1.GetModelInfoRequest;
import com.paceline.scheduler.v1.GetModelInfoResponse;
import com.paceline.scheduler.v1.SchedulerEntry;
import com.paceline.scheduler.v1.SchedulerServiceGrpc;
import com.paceline.scheduler.v1.Started;
import com.paceline.scheduler.v1.WatchSchedulersRequest;
import com.paceline.scheduler.v1.WatchSchedulersResponse;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerCredentials;
import io.grpc.ServerInterceptor;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;

/** A scheduler with a directory on a port of this machine, which generates six tokens. */
final class Fake extends SchedulerServiceGrpc.SchedulerServiceImplBase implements AutoCloseable {
  /** The text that all generate. */
  static final String WHOLE = "é0é1é2é3é4é5";

  private static final int TOKENS = 6;
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  String model = "print"; // its fingerprint
  String text = "é"; // of each token, before its number
  int hangAfter = Integer.MAX_VALUE; // messages of a stream
  String live = ""; // the id of a request that Abort ends
  Optional<Consumer<ServerCallStreamObserver<WatchSchedulersResponse>>> answer = Optional.empty(); // no directory's
  volatile List<SchedulerEntry> others = List.of();
  final AtomicInteger looks = new AtomicInteger();
  final AtomicInteger infos = new AtomicInteger();
  final List<GenerateRequest> requests = new CopyOnWriteArrayList<>();
  final Set<String> callers = ConcurrentHashMap.newKeySet(); // what calls had as authorization
  private final Server server;

  Fake() throws IOException {
    this(InsecureServerCredentials.create());
  }

  Fake(ServerCredentials credentials) throws IOException {
    server = Grpc.newServerBuilderForPort(0, credentials).addService(this).intercept(new Callers()).build().start();
  }

  private final class Callers implements ServerInterceptor {
    @Override
    public <Q, A> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, A> call, Metadata headers, ServerCallHandler<Q, A> next) {
      callers.add(Optional.ofNullable(headers.get(AUTHORIZATION)).orElse(""));
      return next.startCall(call, headers);
    }
  }

  String address() {
    return "127.0.0.1:" + server.getPort();
  }

  /** Its calls end as when its process dies. */
  void stop() {
    server.shutdownNow();
  }

  @Override
  public void close() {
    stop();
  }

  /** The entry of one of the same model. */
  static SchedulerEntry entry(String address, String tlsName) {
    return SchedulerEntry.newBuilder()
        .setAddress(address)
        .setTlsName(tlsName)
        .setModel("m")
        .setModelFingerprint(ByteString.copyFromUtf8("print"))
        .setInstance("of " + address)
        .setWrittenBy("somebody")
        .build();
  }

  SchedulerEntry own() {
    return entry("own:1", "").toBuilder()
        .clearWrittenBy()
        .setModelFingerprint(ByteString.copyFromUtf8(model))
        .build();
  }

  @Override
  public void generate(GenerateRequest request, StreamObserver<GenerateResponse> replies) {
    requests.add(request);
    List<GenerateResponse> messages = messages(request);
    messages.subList(0, Math.min(messages.size(), hangAfter)).forEach(replies::onNext);
    if (messages.size() <= hangAfter) {
      replies.onCompleted();
    }
  }

  @Override
  public void generateUnary(GenerateUnaryRequest request, StreamObserver<GenerateUnaryResponse> reply) {
    requests.add(request.getRequest());
    Collector collector = new Collector();
    messages(request.getRequest()).stream().skip(1).forEach(collector::add);
    answer(reply, GenerateUnaryResponse.newBuilder().addAllCompletions(collector.completions()).build());
  }

  @Override
  public void getModelInfo(GetModelInfoRequest request, StreamObserver<GetModelInfoResponse> reply) {
    infos.incrementAndGet();
    answer(reply, GetModelInfoResponse.newBuilder().setModelFingerprint(ByteString.copyFromUtf8(model)).build());
  }

  @Override
  public void watchSchedulers(WatchSchedulersRequest request, StreamObserver<WatchSchedulersResponse> replies) {
    looks.incrementAndGet();
    if (answer.isPresent()) {
      answer.get().accept((ServerCallStreamObserver<WatchSchedulersResponse>) replies);
      return;
    }
    replies.onNext(WatchSchedulersResponse.newBuilder().addEntries(own()).build());
    replies.onNext(WatchSchedulersResponse.newBuilder().addAllEntries(others).setComplete(true).build());
  }

  @Override
  public void abort(AbortRequest request, StreamObserver<AbortResponse> reply) {
    List<String> aborted = request.getRequestIdsList().stream().filter(live::equals).toList();
    answer(reply, AbortResponse.newBuilder().addAllAborted(aborted).build());
  }

  private static <T> void answer(StreamObserver<T> reply, T message) {
    reply.onNext(message);
    reply.onCompleted();
  }

  private List<GenerateResponse> messages(GenerateRequest request) {
    Continuation continuation = request.getContinuation();
    int received = continuation.getCompletionsList().stream().mapToInt(one -> one.getTokenIdsCount()).sum();
    List<GenerateResponse> messages = new ArrayList<>();
    messages.add(
        GenerateResponse.newBuilder()
            .setStarted(
                Started.newBuilder()
                    .setSampling(request.getSampling())
                    .setMaxTokens(TOKENS)
                    .setContinuedTokens(received)
                    .setModelFingerprint(ByteString.copyFromUtf8(model)))
            .build());
    for (int token = received; token < TOKENS; token++) {
      Delta delta = Delta.newBuilder().addTokenIds(token).setText(text + token).build();
      messages.add(GenerateResponse.newBuilder().setDelta(delta).build());
    }
    messages.add(GenerateResponse.newBuilder().setFinished(Finished.getDefaultInstance()).build());
    return messages;
  }
}
