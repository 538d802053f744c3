package com.paceline.client;

import static com.paceline.client.Tests.check;
import static com.paceline.client.Tests.same;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.SchedulerEntry;
import com.paceline.scheduler.v1.SchedulerLoad;
import com.paceline.scheduler.v1.SchedulerState;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.function.Function;
import java.util.stream.Collectors;

/** Plays tests/scenario/directory.json, which tests/scenario/__init__.py describes. */
final class DirectoryTest {
  private static final Path CASES = Path.of("../../tests/scenario/directory.json");

  /** As many looks as there are schedulers that are asked in turn, and more. */
  private static final int TURNS = 6;

  void eachStepOfACaseIsAsItSays() throws IOException {
    JsonArray cases = JsonParser.parseString(Files.readString(CASES)).getAsJsonArray();
    check(cases.size() > 0, CASES);
    for (JsonElement one : cases) {
      JsonObject played = one.getAsJsonObject();
      DirectoryUse use = DirectoryUse.valueOf(played.get("use").getAsString().toUpperCase(Locale.ROOT));
      KnownSchedulers known = new KnownSchedulers(list(played.get("given")), played.get("tls").getAsBoolean(), use);
      for (JsonElement step : played.getAsJsonArray("steps")) {
        play(known, step.getAsJsonObject(), played.get("name").getAsString() + ": " + step);
      }
    }
  }

  private static void play(KnownSchedulers known, JsonObject step, String what) {
    String kind = step.keySet().iterator().next();
    JsonElement value = step.get(kind);
    long at = step.has("at_s") ? ms(step.get("at_s")) : 0;
    Schedulers present = known.present();
    switch (kind) {
      case "saw" -> known.saw(value.getAsString(), entries(step), at);
      case "lost" -> known.lost(value.getAsString(), at);
      case "has_none" -> known.hasNone(value.getAsString(), at);
      case "refused" -> known.refused(value.getAsString(), at);
      case "distrust" -> known.distrust(value.getAsString());
      case "addresses" -> same(Set.copyOf(present.addresses()), names(value), what);
      case "count" -> same(present.addresses().size(), value.getAsInt(), what);
      case "foreign" -> same(present.foreign(), names(value), what);
      case "draining" ->
          same(
              present.addresses().stream()
                  .filter(one -> present.entries().containsKey(one) && present.entries().get(one).drains())
                  .collect(Collectors.toSet()),
              names(value),
              what);
      case "loads" -> same(told(present, Learned::load), each(value, JsonElement::getAsLong), what);
      case "adapters" -> same(told(present, Learned::adapters), each(value, DirectoryTest::names), what);
      case "tls_name" -> {
        JsonElement name = value.getAsJsonArray().get(1);
        String found = known.tlsName(value.getAsJsonArray().get(0).getAsString()).orElse(null);
        same(found, name.isJsonNull() ? null : name.getAsString(), what);
      }
      case "reports" -> {
        ByteString model = ByteString.copyFromUtf8(step.get("fingerprint").getAsString());
        same(known.isWhatItSays(value.getAsString(), model), is(step), what);
      }
      case "checked" -> same(known.isChecked(value.getAsString()), is(step), what);
      case "asks" -> {
        Set<String> down = step.has("down") ? names(step.get("down")) : Set.of();
        Set<String> asked = new HashSet<>();
        for (int i = 0; i < TURNS; i++) {
          asked.add(known.teller(at, down::contains));
        }
        same(asked, names(value), what);
      }
      case "time_to_look_s" -> {
        String caller = step.has("caller") ? step.get("caller").getAsString() : "good";
        same(known.isTimeToLook(ms(value), caller), is(step), what);
      }
      default -> throw new AssertionError("no such step: " + kind);
    }
  }

  private static List<SchedulerEntry> entries(JsonObject step) {
    List<SchedulerEntry> found = new ArrayList<>();
    step.getAsJsonArray("entries").forEach(one -> found.add(entry(one.getAsJsonObject())));
    if (step.has("ports")) {
      JsonArray range = step.getAsJsonArray("ports");
      for (int port = range.get(0).getAsInt(); port < range.get(1).getAsInt(); port++) {
        JsonObject one = new JsonObject();
        one.addProperty("address", "127.0.0.1:" + port);
        found.add(entry(one));
      }
    }
    return found;
  }

  private static SchedulerEntry entry(JsonObject told) {
    Function<String, Integer> count = name -> told.has(name) ? told.get(name).getAsInt() : 0;
    String address = told.get("address").getAsString();
    return SchedulerEntry.newBuilder()
        .setAddress(address)
        .setTlsName(or(told, "tls_name", ""))
        .setModel(or(told, "model", "m"))
        .setModelFingerprint(ByteString.copyFromUtf8(or(told, "fingerprint", "print")))
        .setInstance(or(told, "instance", "of " + address))
        .setWrittenBy(told.has("own") && told.get("own").getAsBoolean() ? "" : "somebody")
        .setState(SchedulerState.valueOf("SCHEDULER_STATE_" + or(told, "state", "SERVING")))
        .setLoad(SchedulerLoad.newBuilder().setRunning(count.apply("running")).setWaiting(count.apply("waiting")))
        .addAllAdapters(told.has("adapters") ? names(told.get("adapters")) : Set.of())
        .build();
  }

  private static String or(JsonObject told, String name, String other) {
    return told.has(name) ? told.get(name).getAsString() : other;
  }

  private static boolean is(JsonObject step) {
    return step.get("is").getAsBoolean();
  }

  private static long ms(JsonElement seconds) {
    return Math.round(1_000 * seconds.getAsDouble());
  }

  private static List<String> list(JsonElement array) {
    List<String> found = new ArrayList<>();
    array.getAsJsonArray().forEach(one -> found.add(one.getAsString()));
    return found;
  }

  private static Set<String> names(JsonElement array) {
    return Set.copyOf(list(array));
  }

  private static <T> Map<String, T> each(JsonElement object, Function<JsonElement, T> value) {
    Map<String, T> found = new HashMap<>();
    object.getAsJsonObject().entrySet().forEach(one -> found.put(one.getKey(), value.apply(one.getValue())));
    return found;
  }

  private static <T> Map<String, T> told(Schedulers present, Function<Learned, T> what) {
    Map<String, T> found = new HashMap<>();
    present.entries().forEach((address, one) -> found.put(address, what.apply(one)));
    return found;
  }
}
