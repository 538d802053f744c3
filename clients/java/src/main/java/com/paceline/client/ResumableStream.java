package com.paceline.client;

import com.paceline.scheduler.v1.Continuation;
import com.paceline.scheduler.v1.ContinuedCompletion;
import com.paceline.scheduler.v1.Delta;
import com.paceline.scheduler.v1.Finished;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.PromptLogprobs;
import com.paceline.scheduler.v1.Returns;
import com.paceline.scheduler.v1.Started;
import com.paceline.scheduler.v1.TokenLogprobs;
import com.paceline.scheduler.v1.ToolCallDelta;
import com.paceline.scheduler.v1.Usage;
import io.grpc.Status;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.UUID;

/**
 * Joins the attempts of one Generate call into one stream. No I/O; times are milliseconds.
 *
 * <p>For each attempt, send the request that {@link #attempt} returns, then pass each message to {@link #see}; when the
 * attempt is lost, begin another. The events of all attempts together are those of a stream that was never interrupted.
 * Times in usage count from the first attempt on, and cached_tokens is its; preemptions, drafts and queue_ms are the
 * last attempt's, for a scheduler reports them only with the end.
 */
final class ResumableStream {
  private static final SecureRandom RANDOM = new SecureRandom();

  /** Attempts in a row that were begun and brought no token, after which the request is not sent again. */
  private static final int MAX_FRUITLESS = 8;

  private final GenerateRequest request;
  private final int completions;
  private final Map<Integer, Received> received = new TreeMap<>(); // by index
  private int finished;
  private Optional<Long> beganAt = Optional.empty(); // when the attempt was sent that brought the first event
  private long sentAt;
  private int offsetMs; // from beganAt to the current attempt
  private Optional<Started> first = Optional.empty(); // of the attempt that brought the first event
  private final List<TokenLogprobs> promptLogprobs = new ArrayList<>();
  private boolean attemptStarted; // the current attempt brought a Started
  private Optional<Integer> continued = Optional.empty(); // tokens in the current attempt's continuation
  private int fruitless; // attempts in a row that began and brought no token
  private Bounds bounds;

  /** What was received of one completion. */
  private static final class Received {
    final ContinuedCompletion.Builder continued = ContinuedCompletion.newBuilder();
    Optional<Integer> firstMs = Optional.empty(); // from the request's arrival to its first tokens
    long textBytes; // of text, reasoning and tool calls

    Received(int index) {
      continued.setIndex(index);
    }
  }

  /** The request gets an id and a seed if it has none: sent again, it is the same request. */
  ResumableStream(GenerateRequest given) {
    GenerateRequest.Builder builder = identified(given).toBuilder();
    if (builder.getReturns() == Returns.RETURNS_TEXT) {
      builder.setReturns(Returns.RETURNS_BOTH); // a continuation needs the token ids
    }
    request = builder.build();
    completions = Math.max(request.getN(), 1);
    bounds = new Bounds(request, Started.getDefaultInstance());
  }

  /** The request, with an id and a seed drawn if it has none. */
  static GenerateRequest identified(GenerateRequest given) {
    GenerateRequest.Builder builder = given.toBuilder();
    if (builder.getRequestId().isEmpty()) {
      builder.setRequestId(drawnId());
    }
    if (!builder.getSampling().hasSeed()) {
      builder.getSamplingBuilder().setSeed(RANDOM.nextLong());
    }
    return builder.build();
  }

  /** An id for a request. */
  static String drawnId() {
    return UUID.randomUUID().toString();
  }

  String requestId() {
    return request.getRequestId();
  }

  Optional<Started> started() {
    return first;
  }

  List<TokenLogprobs> promptLogprobs() {
    return Collections.unmodifiableList(promptLogprobs);
  }

  /** Whether all completions have finished: then nothing is missing, whatever the call's status is. */
  boolean isComplete() {
    return finished == completions;
  }

  /** The request to send now: the caller's, or its continuation. */
  GenerateRequest attempt(long now) {
    int tokens = received.values().stream().mapToInt(one -> one.continued.getTokenIdsCount()).sum();
    if (tokens != continued.orElse(0)) {
      fruitless = 0;
    } else if (attemptStarted) {
      fruitless++;
    }
    if (fruitless >= MAX_FRUITLESS) {
      throw PacelineException.lost(MAX_FRUITLESS + " attempts in a row brought no token", null);
    }
    attemptStarted = false;
    sentAt = now;
    if (beganAt.isEmpty()) {
      first = Optional.empty();
      promptLogprobs.clear();
      return request;
    }
    Started started =
        first.orElseThrow(() -> PacelineException.lost("its scheduler is too old to say how", null));
    offsetMs = (int) (now - beganAt.get());
    Continuation.Builder continuation =
        Continuation.newBuilder()
            .setPromptDigest(started.getPromptDigest())
            .setModelFingerprint(started.getModelFingerprint())
            .setSampler(started.getSampler())
            .setAdapterFingerprint(started.getAdapterFingerprint());
    received.values().forEach(one -> continuation.addCompletions(one.continued));
    continued = Optional.of(tokens);
    GenerateRequest.Builder next = request.toBuilder();
    next.setSampling(started.getSampling()).setContinuation(continuation);
    next.getStopBuilder().setMaxTokens(started.getMaxTokens());
    return next.build();
  }

  /** Takes the next message of the attempt; returns the event for the caller, if it is one. */
  Optional<GenerateResponse> see(GenerateResponse message) {
    if (message.hasStarted()) {
      seeStarted(message.getStarted());
    } else if (message.hasPromptLogprobs()) {
      seePromptLogprobs(message.getPromptLogprobs());
    }
    if (!message.hasDelta() && !message.hasFinished()) {
      return Optional.empty(); // not for the caller, or of a later revision
    }
    if (continued.isPresent() && !attemptStarted) {
      throw ignored(0);
    }
    int index = message.getIndex();
    boolean isAsked = index >= 0 && index < completions;
    Received one = isAsked ? received.computeIfAbsent(index, Received::new) : null;
    if (one == null || one.continued.getFinished()) {
      throw PacelineException.incomplete(
          "an event of completion " + Integer.toUnsignedString(index) + ", which has finished or was not asked for");
    }
    if (beganAt.isEmpty()) {
      checkPromptLogprobs();
      beganAt = Optional.of(sentAt);
    }
    if (message.hasDelta()) {
      return Optional.of(message.toBuilder().setDelta(add(one, message.getDelta())).build());
    }
    one.continued.setFinished(true);
    finished++;
    return Optional.of(message.toBuilder().setFinished(joined(one, message.getFinished())).build());
  }

  /** The attempt has ended OK. Throws PacelineException if something is missing. */
  void checkEnd() {
    if (!isComplete()) {
      throw PacelineException.incomplete(
          "the stream ended when " + finished + " of " + completions + " completions had finished");
    }
  }

  /** The error for the caller when the last attempt, at this address, ended with {@code error}. */
  PacelineException finalError(PacelineException error, String address) {
    if (beganAt.isEmpty()) {
      return error;
    }
    String why = error.getMessage() + " (" + address + ")";
    if (error.isRetryable() || error.code() == Status.Code.ALREADY_EXISTS) {
      return PacelineException.lost(why, error);
    }
    // Of another prompt, model or sampler; or without the adapter.
    boolean mismatch =
        error.code() == Status.Code.FAILED_PRECONDITION || error.code() == Status.Code.NOT_FOUND;
    return mismatch && continued.isPresent() ? PacelineException.refused(why, error) : error;
  }

  private void seeStarted(Started started) {
    if (attemptStarted) {
      throw PacelineException.incomplete("the scheduler began the stream twice");
    }
    attemptStarted = true;
    if (first.isEmpty()) {
      first = Optional.of(started);
      bounds = new Bounds(request, started);
    }
    if (continued.isPresent() && started.getContinuedTokens() != continued.get()) {
      throw ignored(started.getContinuedTokens());
    }
  }

  private void seePromptLogprobs(PromptLogprobs part) {
    if (beganAt.isPresent() || !request.hasPromptLogprobs()) {
      return; // a continuation without tokens repeats them
    }
    if (part.getFirst() != 1 + promptLogprobs.size()) {
      throw PacelineException.incomplete(
          "logprobs of the prompt from token " + part.getFirst() + " on, behind " + promptLogprobs.size());
    }
    promptLogprobs.addAll(part.getLogprobsList());
    if (promptLogprobs.size() >= Math.max(first.map(Started::getPromptTokens).orElse(0), 1)) {
      throw PacelineException.incomplete("more logprobs of the prompt came than it has tokens");
    }
    Bounds.checkNumbers(part.getLogprobsList());
  }

  /** Before the first event, which comes after all of them. */
  private void checkPromptLogprobs() {
    if (first.isEmpty() || !request.hasPromptLogprobs()) {
      return;
    }
    int wanted = first.get().getPromptTokens() - 1;
    if (promptLogprobs.size() != wanted) {
      throw PacelineException.incomplete(
          promptLogprobs.size() + " logprobs of the prompt came before the first token, not " + wanted);
    }
  }

  private Delta add(Received one, Delta delta) {
    ContinuedCompletion.Builder sum = one.continued;
    sum.addAllTokenIds(delta.getTokenIdsList());
    sum.setTextBytes(sum.getTextBytes() + delta.getTextBytes().size());
    sum.setReasoningBytes(sum.getReasoningBytes() + delta.getReasoningBytes().size());
    for (ToolCallDelta call : delta.getToolCallsList()) {
      int begun = sum.getArgumentBytesCount();
      if (Integer.compareUnsigned(call.getIndex(), begun) > 0 || call.getName().isEmpty() == (call.getIndex() == begun)) {
        throw PacelineException.incomplete(
            "tool call " + Integer.toUnsignedString(call.getIndex()) + " does not begin with its name, and once");
      }
      if (call.getIndex() == begun) {
        sum.addArgumentBytes(0);
      }
      int bytes = sum.getArgumentBytes(call.getIndex()) + call.getArgumentsBytes().size();
      sum.setArgumentBytes(call.getIndex(), bytes);
      one.textBytes += call.getIdBytes().size() + call.getNameBytes().size() + call.getArgumentsBytes().size();
    }
    one.textBytes += delta.getTextBytes().size() + delta.getReasoningBytes().size();
    bounds.check(delta, sum.getTokenIdsCount(), one.textBytes);
    long elapsedUs = delta.getElapsedUs() + 1_000L * offsetMs;
    if (one.firstMs.isEmpty()) {
      one.firstMs = Optional.of((int) (elapsedUs / 1_000));
    }
    return offsetMs == 0 ? delta : delta.toBuilder().setElapsedUs(elapsedUs).build();
  }

  /** The end of a completion with the usage of all attempts. */
  private Finished joined(Received one, Finished end) {
    if (continued.isEmpty()) {
      return end;
    }
    Usage usage = end.getUsage();
    int firstTokenMs = usage.getFirstTokenMs() + offsetMs;
    return end.toBuilder()
        .setUsage(
            usage.toBuilder()
                .setCachedTokens(first.orElseThrow().getCachedTokens())
                .setTotalMs(usage.getTotalMs() + offsetMs)
                .setFirstTokenMs(Math.min(firstTokenMs, one.firstMs.orElse(firstTokenMs))))
        .build();
  }

  private PacelineException ignored(int tokens) {
    return PacelineException.lost(
        "the scheduler took over " + tokens + " of " + continued.orElse(0)
            + " tokens received (0: it knows no continuations)",
        null);
  }
}
