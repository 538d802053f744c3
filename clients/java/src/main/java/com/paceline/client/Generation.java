package com.paceline.client;

import com.paceline.scheduler.v1.Completion;
import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.Started;
import com.paceline.scheduler.v1.TokenLogprobs;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/**
 * One Generate call, over as many schedulers as it takes: events that have a delta or a finished. For one thread, but
 * for {@link #close}, which cancels the request: the scheduler computes nothing for it from its next step on.
 */
public final class Generation implements Iterable<GenerateResponse>, Iterator<GenerateResponse>, AutoCloseable {
  /** The wait for a stream's end when all completions have finished. */
  private static final long END_TIMEOUT_MS = 1_000;

  private final Connections connections;
  private final Attempts attempts;
  private final ResumableStream resumable;
  private final Context.CancellableContext context = Context.current().withCancellation();
  private final CountDownLatch closed = new CountDownLatch(1);
  private Iterator<GenerateResponse> replies; // of the current attempt; null: it is to begin
  private final AtomicReference<Runnable> leave = new AtomicReference<>(() -> {}); // the current attempt
  private boolean reached; // the current attempt was sent on an established connection
  private Optional<GenerateResponse> upcoming = Optional.empty();
  private boolean ended;

  Generation(Connections connections, Attempts attempts, ResumableStream resumable) {
    this.connections = connections;
    this.attempts = attempts;
    this.resumable = resumable;
  }

  /** The request's id, drawn if the caller gave none: {@link Client#abort} takes it. */
  public String requestId() {
    return resumable.requestId();
  }

  /** The request with its defaults filled in; empty before the first event. */
  public Optional<Started> started() {
    return resumable.started();
  }

  /** Of the prompt's tokens but the first, if the request asks for them; complete with the first event. */
  public List<TokenLogprobs> promptLogprobs() {
    return resumable.promptLogprobs();
  }

  /** This stream: it can be read once. */
  @Override
  public Iterator<GenerateResponse> iterator() {
    return this;
  }

  /** Waits for the next event; false when all completions have finished. */
  @Override
  public boolean hasNext() {
    try {
      while (upcoming.isEmpty() && !ended) {
        advance();
      }
    } catch (PacelineException error) {
      end();
      throw error;
    }
    return upcoming.isPresent();
  }

  @Override
  public GenerateResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    GenerateResponse event = upcoming.orElseThrow();
    upcoming = Optional.empty();
    return event;
  }

  /** Reads the rest of the stream; what {@link Client#complete} gives. */
  public List<Completion> collect() {
    Collector collector = new Collector();
    forEachRemaining(collector::add);
    return collector.completions();
  }

  /** Cancels what is left of the stream, from any thread: {@code hasNext} throws a CANCELLED PacelineException. */
  @Override
  public void close() {
    closed.countDown();
    cancel();
  }

  private void end() {
    ended = true;
    cancel();
  }

  private void cancel() {
    context.cancel(null);
    leave.getAndSet(() -> {}).run();
  }

  /** Reads one message, or begins the attempt after one that failed. */
  private void advance() {
    try {
      if (replies == null) {
        begin();
      }
      if (hasReply()) {
        see(replies.next());
      } else {
        resumable.checkEnd();
        end();
      }
    } catch (StatusRuntimeException error) {
      if (resumable.isComplete()) {
        end(); // the connection broke after the last event
      } else {
        again(PacelineException.of(error));
      }
    }
  }

  private void see(GenerateResponse message) {
    Optional<PacelineException> lie = connections.checkStarted(attempts.address(), message);
    if (lie.isPresent()) {
      again(lie.get());
    } else {
      attempts.answered(message.getStarted().getModelFingerprint());
      upcoming = resumable.see(message);
    }
  }

  /** Whether another message comes. The end of a stream of which nothing is missing comes soon, or is made. */
  private boolean hasReply() {
    if (!resumable.isComplete()) {
      return replies.hasNext();
    }
    CompletableFuture<Void> limit =
        CompletableFuture.runAsync(
            () -> context.cancel(null),
            CompletableFuture.delayedExecutor(END_TIMEOUT_MS, TimeUnit.MILLISECONDS));
    try {
      return replies.hasNext();
    } finally {
      limit.cancel(false);
    }
  }

  private void begin() {
    long now = Connections.nowMs();
    GenerateRequest request = resumable.attempt(now);
    reached = false;
    Connections.Use use = connections.begin(attempts);
    Context.CancellableContext attempt = context.withCancellation();
    leave.set(
        () -> {
          attempt.cancel(null);
          use.close();
        });
    reached = use.connection.connect(attempts.timeoutMs(now));
    Optional<Long> left = attempts.timeoutMs(Connections.nowMs());
    long loadWaitMs = attempts.loadWaitMs();
    attempt.run(() -> replies = use.connection.stub(left, loadWaitMs).generate(request));
  }

  /** Waits until the attempt after the failed one. Throws the error for the caller if there is none. */
  private void again(PacelineException failure) {
    replies = null;
    leave.getAndSet(() -> {}).run();
    String address = attempts.address();
    try {
      checkOpen();
      long waitMs = attempts.failed(failure, reached, Connections.nowMs());
      if (connections.isClosed()) {
        throw failure;
      }
      closed.await(waitMs, TimeUnit.MILLISECONDS);
      checkOpen();
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      checkOpen();
    } catch (PacelineException error) {
      throw resumable.finalError(error, address);
    }
  }

  private void checkOpen() {
    if (closed.getCount() == 0 || Thread.currentThread().isInterrupted()) {
      throw new PacelineException(Status.Code.CANCELLED, "the stream was cancelled");
    }
  }
}
