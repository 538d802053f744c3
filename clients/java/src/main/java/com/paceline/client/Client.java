package com.paceline.client;

import com.paceline.scheduler.v1.AbortRequest;
import com.paceline.scheduler.v1.Completion;
import com.paceline.scheduler.v1.DetokenizeRequest;
import com.paceline.scheduler.v1.EmbedRequest;
import com.paceline.scheduler.v1.EmbedResponse;
import com.paceline.scheduler.v1.Embedding;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.GenerateUnaryRequest;
import com.paceline.scheduler.v1.GetModelInfoRequest;
import com.paceline.scheduler.v1.GetModelInfoResponse;
import com.paceline.scheduler.v1.GetStatusRequest;
import com.paceline.scheduler.v1.GetStatusResponse;
import com.paceline.scheduler.v1.RankedDocument;
import com.paceline.scheduler.v1.RerankRequest;
import com.paceline.scheduler.v1.RerankResponse;
import com.paceline.scheduler.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import com.paceline.scheduler.v1.ScoreRequest;
import com.paceline.scheduler.v1.ScoreResponse;
import com.paceline.scheduler.v1.TokenizeRequest;
import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.List;
import java.util.Optional;
import java.util.function.Function;

/**
 * The client of Paceline's schedulers: one, or several that serve the same model. Calls are spread over them, and those
 * that one refuses are tried on the others. A stream whose scheduler dies goes on exactly on another one, or on the same
 * one after its restart. Safe for concurrent use.
 *
 * <p>Requests and events are the messages of scheduler.proto; its comments list ranges, defaults and errors. A timeout
 * is a call's deadline, which the scheduler honours too; null: no deadline. Every call throws {@link PacelineException};
 * interrupting its thread cancels it.
 */
public final class Client implements AutoCloseable {
  private final List<String> addresses;
  private final List<Connection> connections = new ArrayList<>();
  private final Rotation rotation;
  private final Duration failoverTimeout;
  private volatile boolean closed;

  private Client(Builder builder) {
    addresses = builder.addresses;
    rotation = new Rotation(addresses);
    failoverTimeout = builder.failoverTimeout;
    for (String address : addresses) {
      connections.add(new Connection(address, builder.credentials, builder.token));
    }
  }

  /**
   * A client of these schedulers, each host:port.
   *
   * @throws IllegalArgumentException if there is none
   */
  public static Builder builder(String... addresses) {
    return new Builder(Arrays.asList(addresses));
  }

  /** The settings of a client. */
  public static final class Builder {
    private final List<String> addresses;
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private String token = "";
    private Duration failoverTimeout = Duration.ofSeconds(30);

    private Builder(List<String> addresses) {
      if (addresses.isEmpty()) {
        throw new IllegalArgumentException("no address is given");
      }
      this.addresses = List.copyOf(addresses);
    }

    /** TlsChannelCredentials encrypt. Default: plaintext, which a scheduler accepts on loopback only. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** Sent as {@code authorization: Bearer TOKEN}; empty: none is sent. */
    public Builder token(String token) {
      this.token = token;
      return this;
    }

    /** How long after the loss of its scheduler a call is sent again; default: 30 s. */
    public Builder failoverTimeout(Duration timeout) {
      this.failoverTimeout = timeout;
      return this;
    }

    /** The client. It connects with the first call. */
    public Client build() {
      return new Client(this);
    }
  }

  /** Closes the connections; calls under way end. */
  @Override
  public void close() {
    closed = true;
    connections.forEach(Connection::close);
  }

  /** A stream of events; the first one asked for sends the request. Close it. */
  public Generation generate(GenerateRequest request, Duration timeout) {
    return generate(request, timeout, "");
  }

  /**
   * The same. Of several schedulers, requests with the same affinity key go to the same one; with an empty one, those
   * whose prompts begin alike.
   */
  public Generation generate(GenerateRequest request, Duration timeout, String affinityKey) {
    Attempts attempts = attempts(timeout, failoverTimeout, affinity(request, affinityKey));
    return new Generation(this, attempts, new ResumableStream(request));
  }

  /** Generates, and waits until all completions have finished: one per index. */
  public List<Completion> complete(GenerateRequest given, Duration timeout) {
    return complete(given, timeout, "");
  }

  /** The same, with an affinity key as {@code generate} has it. */
  public List<Completion> complete(GenerateRequest given, Duration timeout, String affinityKey) {
    GenerateRequest request = ResumableStream.identified(given);
    GenerateUnaryRequest wrapped = GenerateUnaryRequest.newBuilder().setRequest(request).build();
    Attempts attempts = attempts(timeout, failoverTimeout, affinity(request, affinityKey));
    List<Completion> found = call(attempts, stub -> stub.generateUnary(wrapped)).getCompletionsList();
    boolean whole = found.size() == Math.max(request.getN(), 1);
    for (int index = 0; index < found.size(); index++) {
      whole &= found.get(index).getIndex() == index && found.get(index).hasFinished();
    }
    if (!whole) {
      throw PacelineException.incomplete("the reply has not all completions");
    }
    return found;
  }

  /**
   * Logprobs of given texts, or of what follows prompts; nothing is generated. It is sent again when its scheduler dies,
   * as {@code complete}, {@code embed} and {@code rerank} are.
   */
  public ScoreResponse score(ScoreRequest given, Duration timeout) {
    ScoreRequest request = given.toBuilder().setRequestId(idOr(given.getRequestId())).build();
    ScoreResponse reply = call(timeout, failoverTimeout, stub -> stub.score(request));
    checkCount("scores", reply.getScoresCount(), request.getInputsCount());
    reply.getScoresList().forEach(one -> checkCount("logprobs", one.getLogprobsCount(), one.getTokenIdsCount()));
    return reply;
  }

  /** A vector for each text. */
  public EmbedResponse embed(EmbedRequest given, Duration timeout) {
    EmbedRequest request = given.toBuilder().setRequestId(idOr(given.getRequestId())).build();
    EmbedResponse reply = call(timeout, failoverTimeout, stub -> stub.embed(request));
    checkCount("vectors", reply.getEmbeddingsCount(), request.getInputsCount());
    for (Embedding one : reply.getEmbeddingsList()) {
      if (one.getValuesCount() == 0) {
        throw PacelineException.incomplete("the reply has an empty vector");
      }
      checkCount("values of a vector", one.getValuesCount(), reply.getEmbeddings(0).getValuesCount());
    }
    return reply;
  }

  /** Documents by how well they answer a query, best first. */
  public RerankResponse rerank(RerankRequest given, Duration timeout) {
    RerankRequest request = given.toBuilder().setRequestId(idOr(given.getRequestId())).build();
    RerankResponse reply = call(timeout, failoverTimeout, stub -> stub.rerank(request));
    int count = request.getDocumentsCount();
    boolean all = request.getTopN() == 0 || Integer.compareUnsigned(request.getTopN(), count) > 0;
    checkCount("results", reply.getResultsCount(), all ? count : request.getTopN());
    BitSet ranked = new BitSet(count);
    for (RankedDocument one : reply.getResultsList()) {
      int index = one.getIndex();
      if (Integer.compareUnsigned(index, count) >= 0 || ranked.get(index)) {
        throw PacelineException.incomplete(
            "the reply ranks document " + Integer.toUnsignedString(index) + " of " + count + ", or twice");
      }
      ranked.set(index);
    }
    return reply;
  }

  /** Token ids of a text or of messages, as {@code generate} would use them. */
  public List<Integer> tokenize(TokenizeRequest request, Duration timeout) {
    return call(timeout, Duration.ZERO, stub -> stub.tokenize(request)).getTokenIdsList();
  }

  /** The text of token ids. */
  public String detokenize(List<Integer> tokenIds, Duration timeout) {
    DetokenizeRequest request = DetokenizeRequest.newBuilder().addAllTokenIds(tokenIds).build();
    return call(timeout, Duration.ZERO, stub -> stub.detokenize(request)).getText();
  }

  /** The model and the limits of a request. */
  public GetModelInfoResponse modelInfo(Duration timeout) {
    return call(timeout, Duration.ZERO, stub -> stub.getModelInfo(GetModelInfoRequest.getDefaultInstance()));
  }

  /** The live counters of one scheduler that answers. */
  public GetStatusResponse status(Duration timeout) {
    return call(timeout, Duration.ZERO, stub -> stub.getStatus(GetStatusRequest.getDefaultInstance()));
  }

  /**
   * Ends live requests of this identity, on all schedulers; returns the ids of those that it ended. Unknown ids are no
   * error; that no scheduler answers is one.
   */
  public List<String> abort(List<String> requestIds, Duration timeout) {
    AbortRequest request = AbortRequest.newBuilder().addAllRequestIds(requestIds).build();
    List<String> aborted = new ArrayList<>();
    PacelineException failure = null;
    int answers = 0;
    for (Connection connection : connections) {
      try {
        Optional<Long> left = Optional.ofNullable(timeout).map(Duration::toMillis);
        connection.connect(left);
        aborted.addAll(connection.stub(left).abort(request).getAbortedList());
        answers++;
      } catch (StatusRuntimeException error) {
        failure = PacelineException.of(error);
      }
    }
    if (answers == 0) {
      throw failure;
    }
    return aborted;
  }

  String address(int index) {
    return addresses.get(index);
  }

  Connection connection(int index) {
    return connections.get(index);
  }

  boolean isClosed() {
    return closed;
  }

  static long nowMs() {
    return System.nanoTime() / 1_000_000;
  }

  private static String idOr(String given) {
    return given.isEmpty() ? ResumableStream.drawnId() : given;
  }

  private static void checkCount(String what, int found, int wanted) {
    if (found != wanted) {
      throw PacelineException.incomplete("the reply has " + found + " " + what + ", not " + wanted);
    }
  }

  private Attempts attempts(Duration timeout, Duration failoverTimeout, Optional<byte[]> key) {
    Optional<Duration> limit = Optional.ofNullable(timeout);
    return new Attempts(rotation, nowMs(), limit, failoverTimeout, this.failoverTimeout, key);
  }

  /** The request's key among several schedulers. */
  private Optional<byte[]> affinity(GenerateRequest request, String own) {
    return addresses.size() > 1 ? Optional.of(Affinity.key(request, own)) : Optional.empty();
  }

  private <T> T call(
      Duration timeout, Duration failoverTimeout, Function<SchedulerServiceBlockingStub, T> send) {
    return call(attempts(timeout, failoverTimeout, Optional.empty()), send);
  }

  /** Sends a unary call until a scheduler answers it. */
  private <T> T call(Attempts attempts, Function<SchedulerServiceBlockingStub, T> send) {
    for (; ; ) {
      Connection connection = connections.get(attempts.address());
      boolean reached = false;
      long waitMs;
      Runnable end = attempts.begin();
      try {
        reached = connection.connect(attempts.timeoutMs(nowMs()));
        T reply = send.apply(connection.stub(attempts.timeoutMs(nowMs()), attempts.loadWaitMs()));
        attempts.answered();
        return reply;
      } catch (StatusRuntimeException error) {
        PacelineException failure = PacelineException.of(error);
        if (Thread.currentThread().isInterrupted()) {
          throw new PacelineException(Status.Code.CANCELLED, "the thread was interrupted");
        }
        waitMs = attempts.failed(failure, reached, nowMs());
        if (closed) {
          throw failure;
        }
      } finally {
        end.run();
      }
      sleep(waitMs);
    }
  }

  private static void sleep(long ms) {
    try {
      Thread.sleep(ms);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw new PacelineException(Status.Code.CANCELLED, "the thread was interrupted");
    }
  }
}
