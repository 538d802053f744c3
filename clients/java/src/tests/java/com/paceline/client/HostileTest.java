package com.paceline.client;

import static com.paceline.client.Stage.call;
import static com.paceline.client.Stage.clientOf;
import static com.paceline.client.Stage.look;
import static com.paceline.client.Tests.check;
import static com.paceline.client.Tests.same;

import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.GenerateResponse;
import com.paceline.scheduler.v1.SchedulerEntry;
import com.paceline.scheduler.v1.Started;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.Set;

/** Directories with entries of attackers. */
final class HostileTest {
  private static final String SECRET = "a-token-of-many-bytes";

  void aPoisonedEntryGetsNoByteOfAToken() throws Exception {
    Authority ours = new Authority();
    try (Fake given = new Fake(ours.server("localhost"));
        Fake honest = new Fake(ours.server("good.test"));
        Fake stranger = new Fake(new Authority().server("good.test"));
        Fake otherName = new Fake(ours.server("localhost"));
        Fake plain = new Fake();
        Attacker bare = new Attacker()) {
      List<SchedulerEntry> entries = new ArrayList<>();
      entries.add(Fake.entry(plain.address().replace("127.0.0.1", "localhost"), "")); // would be sent in the clear
      entries.add(Fake.entry("localhost:1", "no name"));
      for (Fake one : List.of(honest, stranger, otherName, plain)) {
        entries.add(Fake.entry(one.address(), "good.test"));
      }
      entries.add(Fake.entry(bare.address(), "good.test"));
      given.others = entries;
      for (DirectoryUse use : List.of(DirectoryUse.SAFE, DirectoryUse.ANY)) {
        String address = given.address().replace("127.0.0.1", "localhost");
        Client.Builder builder = Client.builder(address).credentials(ours.client("a.client")).token(SECRET);
        try (Client client = builder.directory(use).build()) {
          look(client, 6);
          for (int i = 0; i < 24; i++) {
            same(call(client, i, i % 2 == 0), Fake.WHOLE, i);
          }
        }
      }
      same(given.callers, Set.of("Bearer " + SECRET), "the given one's callers");
      same(honest.callers, Set.of("Bearer " + SECRET), "the honest one's callers");
      for (Fake one : List.of(stranger, otherName, plain)) {
        same(one.callers, Set.of(), "callers");
      }
      String came = bare.received();
      check(came.startsWith("\u0016") && !came.contains(SECRET), came); // a TLS handshake, which nobody answers
    }
  }

  void aTokenStaysOnThisMachineWithoutTls() throws Exception {
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      given.others =
          List.of(Fake.entry("10.0.0.2:1", ""), Fake.entry("unix:1", ""), Fake.entry("localhost:1", "name"));
      look(client, 0);
    }
  }

  void anEntryThatLiesAboutItsModelServesNobody() throws Exception {
    for (boolean isUnary : new boolean[] {false, true}) {
      try (Fake liar = new Fake(); Fake given = new Fake(); Client client = clientOf(given)) {
        liar.model = "another";
        liar.text = "a lie";
        given.others = List.of(Fake.entry(liar.address(), ""));
        look(client, 1);
        for (int i = 0; i < 24; i++) {
          same(call(client, i, isUnary), Fake.WHOLE, i);
        }
        same(client.addresses(), List.of(given.address()), "addresses");
        same(liar.infos.get() + " " + liar.requests.size(), isUnary ? "1 0" : "0 1", "calls");
        same(client.connections().openCount(), 1, "open");
      }
    }
  }

  void whatHasAnotherModelThanItsEntryIsUnavailable() throws Exception {
    try (Fake given = new Fake(); Client client = clientOf(given)) {
      given.others = List.of(Fake.entry("127.0.0.1:1", ""));
      look(client, 1);
      same(started(client, "127.0.0.1:1", "print"), Optional.empty(), "as the entry says");
      same(started(client, given.address(), "whatever"), Optional.empty(), "a given one");
      PacelineException error = started(client, "127.0.0.1:1", "another").orElseThrow();
      same(error.code() + " " + error.reason(), Status.Code.UNAVAILABLE + " OTHER_MODEL", "the error");
      check(error.isRetryable(), error);
      same(client.addresses().size(), 1, client.addresses());
    }
  }

  private static Optional<PacelineException> started(Client client, String address, String model) {
    Started started = Started.newBuilder().setModelFingerprint(ByteString.copyFromUtf8(model)).build();
    return client.connections().checkStarted(address, GenerateResponse.newBuilder().setStarted(started).build());
  }
}
