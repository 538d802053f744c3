package com.paceline.client;

import static com.paceline.client.Tests.check;
import static com.paceline.client.Tests.same;
import static java.nio.charset.StandardCharsets.UTF_8;

import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.GenerateRequest;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

/** The order in which calls try addresses. */
final class RotationTest {
  private static final List<String> THREE = List.of("10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051");

  private final Rotation rotation = new Rotation(List.of("a:1"));

  private static Learned learned(String model, long load, boolean drains, Set<String> adapters) {
    return new Learned(new Learned.Start("", ""), "", ByteString.copyFromUtf8(model), load, drains, adapters);
  }

  private static List<String> order(Rotation rotation, Optional<byte[]> key, String model, long now) {
    return new ArrayList<>(rotation.order(now, key, model, ByteString.EMPTY));
  }

  /** The addresses with which calls of many keys begin. */
  private Set<String> keyed(String model) {
    return IntStream.range(0, 20)
        .mapToObj(number -> order(rotation, key(number), model, 0).get(0))
        .collect(Collectors.toSet());
  }

  private static Optional<byte[]> key(int number) {
    return Optional.of(("" + number).getBytes(UTF_8));
  }

  void anAddressThatIsDownComesLastForAWhileAndLongerEachTime() {
    Rotation two = new Rotation(List.of("a:1", "b:1"));
    two.down("a:1", 0);
    two.down("a:1", 500); // another call has found out too
    same(firsts(two, 999), Set.of("b:1"), "a is down");
    same(firsts(two, 1_000), Set.of("a:1", "b:1"), "a may be up");
    two.down("a:1", 1_000);
    same(firsts(two, 2_999), Set.of("b:1"), "a is down for longer");
    two.up("a:1");
    same(firsts(two, 2_999), Set.of("a:1", "b:1"), "a is up");
  }

  private static Set<String> firsts(Rotation rotation, long now) {
    return IntStream.range(0, 4)
        .mapToObj(call -> order(rotation, Optional.empty(), "", now).get(0))
        .collect(Collectors.toSet());
  }

  void aCallsKeyDecidesWhereItBeginsUnlessTooManyOfTheClientsCallsAreThere() {
    Optional<byte[]> key = Optional.of(Affinity.key(GenerateRequest.newBuilder().setText("hello").build(), ""));
    Rotation three = new Rotation(THREE);
    same(order(three, key, "", 0), List.of(THREE.get(1), THREE.get(2), THREE.get(0)), "by weight");
    three.began(THREE.get(1)); // of 2 calls with the next one: at most 1 each
    same(order(three, key, "", 0), List.of(THREE.get(2), THREE.get(1), THREE.get(0)), "one has its share");
    three.down(THREE.get(2), 0);
    same(order(three, key, "", 0), List.of(THREE.get(1), THREE.get(0), THREE.get(2)), "one is down");
  }

  void callsGoByTheLoadThatTheDirectoryTellsAndLastToThoseThatDrain() {
    var entries = Map.of("b:1", learned("", 3, false, Set.of()), "c:1", learned("", 0, true, Set.of()));
    rotation.use(new Schedulers(List.of("a:1", "b:1", "c:1"), entries, Set.of()));
    for (int i = 0; i < 3; i++) {
      same(order(rotation, Optional.empty(), "", 0).get(2), "c:1", "the last one");
    }
    same(keyed(""), Set.of("a:1"), "b has more than its share");
    rotation.began("b:1");
    rotation.use(Schedulers.of(List.of("a:1")));
    check(!rotation.isUnused("b:1"), "a call is there");
    rotation.ended("b:1");
    check(rotation.isUnused("b:1") && !rotation.isUnused("a:1"), "no call is there");
  }

  void whoClaimsThatNobodyIsThereGetsNoMoreThanAShareOfTheClientsCalls() {
    var entries = Map.of("a:1", learned("", 1_000, false, Set.of()), "liar:1", learned("", 0, false, Set.of()));
    rotation.use(new Schedulers(List.of("a:1", "liar:1"), entries, Set.of()));
    List<String> begun = new ArrayList<>();
    for (int number = 0; number < 20; number++) {
      begun.add(order(rotation, key(number), "", 0).get(0));
      rotation.began(begun.get(number));
    }
    check(begun.stream().filter("liar:1"::equals).count() <= 13, begun);
  }

  void thoseWithTheAdapterComeFirst() {
    var entries = Map.of("a:1", learned("", 3, false, Set.of()), "b:1", learned("", 0, false, Set.of("poet")));
    rotation.use(new Schedulers(List.of("a:1", "b:1"), entries, Set.of()));
    same(keyed("poet"), Set.of("b:1"), "with a key");
    same(order(rotation, Optional.empty(), "poet", 0).get(0), "b:1", "without one");
    same(firsts(rotation, 0), Set.of("a:1", "b:1"), "without an adapter");
  }

  void aFewLearnedAddressesAreTriedBeforeAGivenOneAndNotAllOfThousands() {
    List<String> all = new ArrayList<>(List.of("a:1"));
    IntStream.range(0, 1_000).forEach(number -> all.add("learned:" + number));
    rotation.use(Schedulers.of(all));
    for (int number = 0; number < 100; number++) {
      for (Optional<byte[]> key : List.of(key(number), Optional.<byte[]>empty())) {
        List<String> order = order(rotation, key, "", 0);
        same(new HashSet<>(order).size(), Rotation.MAX_TRIED, order);
        int place = order.indexOf("a:1");
        check(place >= 0 && place <= Rotation.TRIED_BEFORE_GIVEN, order);
      }
    }
  }

  void whatALearnedOneDoesNotKnowAGivenOneDecides() {
    rotation.use(Schedulers.of(List.of("b:1", "c:1", "d:1", "a:1")));
    Attempts call = attempts(Optional.empty());
    same(call.address(), "b:1", "first tried");
    call.failed(error(Status.NOT_FOUND), true, 0);
    same(call.address(), "a:1", "then tried");
    try {
      call.failed(error(Status.NOT_FOUND), true, 0);
      throw new AssertionError("it is not the last word");
    } catch (PacelineException last) {
      same(last.code(), Status.Code.NOT_FOUND, last);
    }
  }

  void anotherModelGetsNewCallsOnceThePresentOneTakesNoneAndNoStreamThatBegan() {
    Learned old = learned("old", 0, false, Set.of());
    var entries = Map.of("a:1", old, "b:1", old, "new:1", learned("new", 0, false, Set.of()));
    rotation.use(new Schedulers(List.of("a:1", "b:1", "new:1"), entries, Set.of("new:1")));
    same(keyed(""), Set.of("a:1", "b:1"), "new calls");
    Attempts stream = attempts(key(0));
    stream.answered(ByteString.EMPTY);
    Attempts call = attempts(key(0));
    call.failed(error(Status.UNAVAILABLE), false, 0);
    check(!call.address().equals("new:1"), call.address());
    call.failed(error(Status.UNAVAILABLE), false, 0);
    same(call.address(), "new:1", "after both");
    same(attempts(key(0)).address(), "new:1", "at once, as long as the others take none");
    for (int i = 0; i < 3; i++) {
      stream.failed(error(Status.UNAVAILABLE), true, 0);
      check(!stream.address().equals("new:1"), "the stream began with the old one");
    }
  }

  void aStreamGoesOnOnlyByTheModelThatItSaidItBeganWith() {
    Learned old = learned("old", 0, false, Set.of());
    Learned loads = learned("", 0, false, Set.of());
    rotation.use(new Schedulers(List.of("a:1", "b:1"), Map.of("a:1", loads, "b:1", old), Set.of()));
    Attempts stream = attempts(Optional.empty());
    same(stream.address(), "a:1", "where it begins");
    stream.answered(ByteString.copyFromUtf8("new"));
    rotation.use(
        new Schedulers(
            List.of("a:1", "b:1", "c:1"),
            Map.of("a:1", loads, "b:1", old, "c:1", learned("new", 0, false, Set.of())),
            Set.of()));
    stream.failed(error(Status.UNAVAILABLE), true, 0);
    same(stream.address(), "c:1", "where it goes on");
  }

  private Attempts attempts(Optional<byte[]> key) {
    Duration failover = Duration.ofSeconds(60);
    return new Attempts(rotation, 0, Optional.empty(), failover, Duration.ZERO, key, "");
  }

  private static PacelineException error(Status status) {
    return PacelineException.of(new StatusRuntimeException(status));
  }
}
