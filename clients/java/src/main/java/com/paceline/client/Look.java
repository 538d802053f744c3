package com.paceline.client;

import com.paceline.scheduler.v1.SchedulerEntry;
import com.paceline.scheduler.v1.WatchSchedulersRequest;
import com.paceline.scheduler.v1.WatchSchedulersResponse;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/** One look into a scheduler's directory: a call of WatchSchedulers, read up to {@code complete} and bounded. */
final class Look implements ClientResponseObserver<WatchSchedulersRequest, WatchSchedulersResponse> {
  static final long TIMEOUT_MS = 5_000;

  /** A message has 128 KiB at most. Many small entries take far more memory than bytes. */
  static final int MAX_MESSAGE_BYTES = 256 << 10;

  /** Of the answer, each message counted as MESSAGE_BYTES more than it has. */
  private static final int MAX_BYTES = 16 << 20;

  private static final int MESSAGE_BYTES = 64 << 10;

  private final CompletableFuture<List<SchedulerEntry>> listed = new CompletableFuture<>();
  private final List<SchedulerEntry> entries = new ArrayList<>();
  private ClientCallStreamObserver<WatchSchedulersRequest> call;
  private int bytes;

  /** All entries, or none if it does not end; StatusRuntimeException: the call failed. */
  CompletableFuture<List<SchedulerEntry>> listed() {
    return listed;
  }

  @Override
  public void beforeStart(ClientCallStreamObserver<WatchSchedulersRequest> begun) {
    call = begun;
  }

  @Override
  public void onNext(WatchSchedulersResponse message) {
    int room = KnownSchedulers.MAX_ENTRIES - entries.size();
    entries.addAll(message.getEntriesList().subList(0, Math.min(message.getEntriesCount(), room)));
    bytes += MESSAGE_BYTES + message.getSerializedSize();
    if (message.getComplete()) {
      end(entries);
    } else if (bytes >= MAX_BYTES) {
      end(List.of());
    }
  }

  @Override
  public void onError(Throwable error) {
    listed.completeExceptionally(error);
  }

  @Override
  public void onCompleted() {
    listed.complete(List.of());
  }

  private void end(List<SchedulerEntry> found) {
    listed.complete(found);
    call.cancel("the look is over", null);
  }
}
