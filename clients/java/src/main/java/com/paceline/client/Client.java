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
import com.paceline.scheduler.v1.ScoreRequest;
import com.paceline.scheduler.v1.ScoreResponse;
import com.paceline.scheduler.v1.TokenizeRequest;
import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.time.Duration;
import java.util.Arrays;
import java.util.BitSet;
import java.util.List;
import java.util.Objects;

/**
 * The client of Paceline's schedulers: one, or several that serve the same model. Calls are spread over them, and those
 * that one refuses are tried on the others. A stream whose scheduler dies goes on exactly on another one, or on the same
 * one after its restart. Where the schedulers have a directory, the client learns of others with the same model, and
 * uses them too ({@link Builder#directory}). Safe for concurrent use.
 *
 * <p>Requests and events are the messages of scheduler.proto; its comments list ranges, defaults and errors. A timeout
 * is a call's deadline, which the scheduler honours too; null: no deadline. Every call throws {@link PacelineException};
 * interrupting its thread cancels it.
 */
public final class Client implements AutoCloseable {
  private final Connections connections;
  private final Calls calls;

  private Client(Builder builder) {
    KnownSchedulers known = known(builder.addresses, builder.credentials, builder.directory);
    connections = new Connections(builder.addresses, known, builder.credentials, builder.token);
    calls = new Calls(connections, builder.failoverTimeout);
  }

  static KnownSchedulers known(List<String> given, ChannelCredentials credentials, DirectoryUse use) {
    boolean hasAuthority = credentials instanceof TlsChannelCredentials tls && tls.getRootCertificates() != null;
    boolean canTell = hasAuthority || credentials instanceof InsecureChannelCredentials;
    return new KnownSchedulers(given, hasAuthority, canTell ? use : DirectoryUse.OFF);
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
    private DirectoryUse directory = DirectoryUse.SAFE;

    private Builder(List<String> addresses) {
      if (addresses.isEmpty()) {
        throw new IllegalArgumentException("no address is given");
      }
      this.addresses = addresses.stream().distinct().toList();
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

    /**
     * Which of those schedulers the client uses too that the given ones list in their directory, for the same model only;
     * default: SAFE. With credentials that are neither plaintext nor TLS by root certificates given as a file or stream,
     * none is used: any public certificate would do, or nobody can tell.
     */
    public Builder directory(DirectoryUse use) {
      directory = Objects.requireNonNull(use);
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
    connections.close();
  }

  /** Of the schedulers that are used now: the given ones, then those learned from a directory. */
  public List<String> addresses() {
    return connections.known().addresses();
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
    Attempts attempts = calls.attempts(request, timeout, affinityKey);
    return new Generation(connections, attempts, new ResumableStream(request));
  }

  /** Generates, and waits until all completions have finished: one per index. */
  public List<Completion> complete(GenerateRequest given, Duration timeout) {
    return complete(given, timeout, "");
  }

  /** The same, with an affinity key as {@code generate} has it. */
  public List<Completion> complete(GenerateRequest given, Duration timeout, String affinityKey) {
    GenerateRequest request = ResumableStream.identified(given);
    GenerateUnaryRequest wrapped = GenerateUnaryRequest.newBuilder().setRequest(request).build();
    Attempts attempts = calls.attempts(request, timeout, affinityKey);
    List<Completion> found = calls.on(attempts, stub -> stub.generateUnary(wrapped)).getCompletionsList();
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
    ScoreResponse reply = calls.safely(timeout, request.getModel(), stub -> stub.score(request));
    checkCount("scores", reply.getScoresCount(), request.getInputsCount());
    reply.getScoresList().forEach(one -> checkCount("logprobs", one.getLogprobsCount(), one.getTokenIdsCount()));
    return reply;
  }

  /** A vector for each text. */
  public EmbedResponse embed(EmbedRequest given, Duration timeout) {
    EmbedRequest request = given.toBuilder().setRequestId(idOr(given.getRequestId())).build();
    EmbedResponse reply = calls.safely(timeout, request.getModel(), stub -> stub.embed(request));
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
    RerankResponse reply = calls.safely(timeout, request.getModel(), stub -> stub.rerank(request));
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
    return calls.once(timeout, request.getModel(), stub -> stub.tokenize(request)).getTokenIdsList();
  }

  /** The text of token ids. */
  public String detokenize(List<Integer> tokenIds, Duration timeout) {
    DetokenizeRequest request = DetokenizeRequest.newBuilder().addAllTokenIds(tokenIds).build();
    return calls.once(timeout, "", stub -> stub.detokenize(request)).getText();
  }

  /** The model and the limits of a request. */
  public GetModelInfoResponse modelInfo(Duration timeout) {
    return calls.once(timeout, "", stub -> stub.getModelInfo(GetModelInfoRequest.getDefaultInstance()));
  }

  /** The live counters of one scheduler that answers. */
  public GetStatusResponse status(Duration timeout) {
    return calls.once(timeout, "", stub -> stub.getStatus(GetStatusRequest.getDefaultInstance()));
  }

  /**
   * Ends live requests of this identity, on all schedulers; returns the ids of those that it ended. Unknown ids are no
   * error; that no scheduler answers is one.
   */
  public List<String> abort(List<String> requestIds, Duration timeout) {
    AbortRequest request = AbortRequest.newBuilder().addAllRequestIds(requestIds).build();
    return calls.onAll(timeout, stub -> stub.abort(request)).stream()
        .flatMap(reply -> reply.getAbortedList().stream())
        .toList();
  }

  Connections connections() {
    return connections;
  }

  private static String idOr(String given) {
    return given.isEmpty() ? ResumableStream.drawnId() : given;
  }

  private static void checkCount(String what, int found, int wanted) {
    if (found != wanted) {
      throw PacelineException.incomplete("the reply has " + found + " " + what + ", not " + wanted);
    }
  }
}
