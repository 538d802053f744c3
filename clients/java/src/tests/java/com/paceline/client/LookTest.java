package com.paceline.client;

import static com.paceline.client.Stage.PATIENCE;
import static com.paceline.client.Stage.PROMPT;
import static com.paceline.client.Stage.call;
import static com.paceline.client.Stage.clientOf;
import static com.paceline.client.Stage.look;
import static com.paceline.client.Stage.until;
import static com.paceline.client.Tests.check;
import static com.paceline.client.Tests.same;

import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.WatchSchedulersResponse;
import io.grpc.Context;
import io.grpc.InsecureChannelCredentials;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import java.io.ByteArrayInputStream;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.Collectors;

/** Clients that are given one scheduler, which knows others. */
final class LookTest {
  void aStreamGoesOnAtASchedulerThatTheDeadOneKnew() throws Exception {
    try (Fake other = new Fake();
        Fake given = new Fake();
        Client client = clientOf(given);
        Generation stream = client.generate(PROMPT, PATIENCE)) {
      given.hangAfter = 4;
      given.others = List.of(Fake.entry(other.address(), ""));
      Collector collector = new Collector();
      for (int i = 0; i < 3; i++) {
        collector.add(stream.next());
      }
      until("the other is known", () -> client.addresses().size() == 2);
      given.stop();
      stream.forEachRemaining(collector::add);
      same(collector.completions().get(0).getText(), Fake.WHOLE, "the text");
      same(other.requests.size(), 1, other.requests);
      check(other.requests.get(0).hasContinuation(), other.requests);
    }
  }

  void callsAreSpreadOverLearnedOnesWhichAreAskedForTheirModelOnce() throws Exception {
    try (Fake other = new Fake(); Fake given = new Fake()) {
      given.others = List.of(Fake.entry(other.address(), ""));
      for (boolean isUnary : new boolean[] {true, false}) {
        try (Client client = clientOf(given)) {
          look(client, 1);
          for (int i = 0; i < 24; i++) {
            same(call(client, i, isUnary), Fake.WHOLE, i);
          }
        }
      }
      same(given.infos.get() + " " + other.infos, "0 1", "they were asked for their model");
      check(!given.requests.isEmpty() && !other.requests.isEmpty(), "one got no call");
      same(given.requests.size() + other.requests.size(), 48, "calls");
    }
  }

  void abortAsksThoseOfTheDirectoryTooWhichIsLookedIntoBefore() throws Exception {
    try (Fake other = new Fake(); Fake given = new Fake(); Client client = clientOf(given)) {
      other.live = "there";
      given.others = List.of(Fake.entry(other.address(), ""), Fake.entry("127.0.0.1:1", ""));
      same(client.abort(List.of("there", "nowhere"), PATIENCE), List.of("there"), "aborted");
    }
  }

  void withoutTheDirectoryNothingIsAskedOrLearned() throws Exception {
    try (Fake given = new Fake();
        Client client = Client.builder(given.address()).directory(DirectoryUse.OFF).build()) {
      given.others = List.of(Fake.entry("127.0.0.1:1", ""));
      same(call(client, 0, true), Fake.WHOLE, "the text");
      client.abort(List.of("x"), PATIENCE);
      same(given.looks.get() + " " + client.addresses().size(), "0 1", "looks and addresses");
    }
  }

  void withTlsTheDirectoryIsUsedOnlyByRootsOfTheCallersOwn() throws Exception {
    var roots = TlsChannelCredentials.newBuilder().trustManager(new ByteArrayInputStream(new byte[0])).build();
    var others = TlsChannelCredentials.newBuilder().trustManager(new Lenient()).build();
    for (var one : List.of(roots, InsecureChannelCredentials.create(), TlsChannelCredentials.create(), others)) {
      boolean isUsed = one == roots || one instanceof InsecureChannelCredentials;
      KnownSchedulers known = Client.known(List.of("127.0.0.1:1"), one, DirectoryUse.ANY);
      same(known.isTimeToLook(0, ""), isUsed, one);
    }
  }

  void aSchedulerWithoutADirectoryIsAskedOnce() throws Exception {
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      given.answer = Optional.of(watch -> watch.onError(Status.UNIMPLEMENTED.asException()));
      for (int i = 0; i < 3; i++) {
        same(call(client, i, i == 0), Fake.WHOLE, "the text");
        until("the look has ended", client.connections().known()::hasLooked);
      }
      same(given.looks.get() + " " + client.addresses().size(), "1 1", "looks and addresses");
      long later = Connections.nowMs() + KnownSchedulers.NO_DIRECTORY_MS / 2;
      check(!client.connections().known().isTimeToLook(later, ""), "it is asked again soon");
    }
  }

  void aClientThatReadsALongStreamLooksMeanwhile() throws Exception {
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      Generation stream = client.generate(PROMPT, PATIENCE);
      for (int i = 1; i < 4; i++) {
        check(stream.hasNext(), "an event");
        stream.next();
        int looks = i;
        until("it looks", () -> given.looks.get() == looks);
        client.connections().lastLook().get(PATIENCE.toMillis(), TimeUnit.MILLISECONDS);
        client.connections().known().refused("nobody", Connections.nowMs() - KnownSchedulers.LOOK_EVERY_MS);
      }
      stream.close();
    }
  }

  void aLookOutlivesTheCallThatBeganIt() throws Exception {
    CountDownLatch called = new CountDownLatch(1);
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      given.answer =
          Optional.of(
              watch -> {
                try {
                  called.await();
                } catch (InterruptedException ended) {
                  return;
                }
                watch.onNext(
                    WatchSchedulersResponse.newBuilder()
                        .addEntries(given.own())
                        .addEntries(Fake.entry("127.0.0.1:1", ""))
                        .setComplete(true)
                        .build());
              });
      Context.CancellableContext callers = Context.current().withCancellation();
      callers.run(() -> same(call(client, 0, true), Fake.WHOLE, "the text"));
      callers.cancel(null);
      called.countDown();
      until("the other is known", () -> client.addresses().size() == 2);
    }
  }

  void aDirectoryThatNeverEndsTakesNoCallAlongAndEndsItself() throws Exception {
    AtomicInteger sent = new AtomicInteger();
    CountDownLatch left = new CountDownLatch(1);
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      given.answer =
          Optional.of(
              watch -> {
                watch.setOnCancelHandler(left::countDown);
                watch.onNext(WatchSchedulersResponse.newBuilder().addEntries(given.own()).build());
                watch.setOnReadyHandler(
                    () -> {
                      while (watch.isReady()) {
                        int port = 2 + sent.incrementAndGet() % 60_000;
                        var entry = Fake.entry("127.0.0.1:" + port, "");
                        watch.onNext(WatchSchedulersResponse.newBuilder().addEntries(entry).build());
                      }
                    });
              });
      same(call(client, 0, false), Fake.WHOLE, "the text");
      client.connections().lastLook().get(PATIENCE.toMillis(), TimeUnit.MILLISECONDS);
      check(left.await(PATIENCE.toMillis(), TimeUnit.MILLISECONDS), "the look goes on");
      check(sent.get() < 20_000, sent); // 256 are read, and some more are on their way
      same(call(client, 0, true), Fake.WHOLE, "the text");
      same(given.looks.get() + " " + client.addresses().size(), "1 1", "looks and addresses");
    }
  }

  void theConnectionToOneThatIsKnownNoMoreIsClosedAfterItsLastCall() throws Exception {
    try (Fake other = new Fake(); Fake given = new Fake(); Client client = clientOf(given)) {
      other.hangAfter = 3;
      given.others = List.of(Fake.entry(other.address(), ""));
      look(client, 1);
      same(client.connections().openCount(), 1, "opened before its first use");
      Generation stream = client.generate(PROMPT, PATIENCE, "0");
      for (int i = 1; other.requests.isEmpty(); i++) {
        stream.close();
        stream = client.generate(PROMPT, PATIENCE, "" + i);
        check(stream.hasNext(), "an event");
      }
      given.others = List.of();
      look(client, 0);
      stream.next();
      check(stream.hasNext(), "the next event");
      same(client.connections().openCount(), 2, "open");
      stream.close();
      same(client.connections().openCount(), 1, "open");
    }
  }

  void whatCannotBeAnAddressOrANameIsUsedByNobody() throws Exception {
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      given.others = List.of(Fake.entry("127.0.0.1:99999", ""), Fake.entry("localhost:0", ""));
      look(client, 2);
      for (int i = 0; i < 24; i++) {
        same(call(client, i, i % 2 == 0), Fake.WHOLE, i);
      }
      check(!client.addresses().contains("127.0.0.1:99999"), client.addresses());
    }
  }

  void closeEndsALookAndLeavesNoThread() throws Exception {
    Set<Thread> before = threads();
    CountDownLatch asked = new CountDownLatch(1);
    CountDownLatch left = new CountDownLatch(1);
    try (Fake silent = new Fake(); Fake other = new Fake(); Fake given = new Fake()) {
      silent.answer =
          Optional.of(
              watch -> {
                watch.setOnCancelHandler(left::countDown);
                asked.countDown();
              });
      Client client = clientOf(silent);
      same(call(client, 0, false), Fake.WHOLE, "the text");
      check(asked.await(PATIENCE.toMillis(), TimeUnit.MILLISECONDS), "no look");
      long began = Connections.nowMs();
      client.close();
      client.connections().lastLook().get(PATIENCE.toMillis(), TimeUnit.MILLISECONDS);
      check(left.await(PATIENCE.toMillis(), TimeUnit.MILLISECONDS), "the look goes on");
      check(Connections.nowMs() - began < Look.TIMEOUT_MS / 2, "it took long");
      try {
        client.complete(PROMPT, PATIENCE);
        throw new AssertionError("a closed client calls");
      } catch (PacelineException closed) {
        same(closed.code(), Status.Code.UNAVAILABLE, closed);
      }
      given.others = List.of(Fake.entry(other.address(), ""));
      try (Client another = clientOf(given)) {
        look(another, 1);
        for (int i = 0; i < 8; i++) {
          same(call(another, i, i % 2 == 0), Fake.WHOLE, i);
        }
      }
    }
    until("all threads have ended", () -> before.containsAll(threads()));
  }

  /** But those of the pools of gRPC and of Java, which all of the process share and which end when they are idle. */
  private static Set<Thread> threads() {
    return Thread.getAllStackTraces().keySet().stream()
        .filter(one -> !one.getName().startsWith("grpc-default-executor"))
        .filter(one -> !one.getName().startsWith("ForkJoinPool.commonPool"))
        .collect(Collectors.toSet());
  }
}
