package com.paceline.client;

import static java.nio.charset.StandardCharsets.UTF_8;

import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.Message;
import java.io.ByteArrayOutputStream;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.ToLongFunction;
import java.util.stream.Collectors;

/**
 * Which of several schedulers gets a request: AFFINITY in scheduler.proto. Requests with the same beginning go to the
 * same scheduler, whose prefix cache then has it.
 */
final class Affinity {
  private static final String VERSION = "paceline-affinity-1";
  private static final int MAX_TEXT_BYTES = 1024;
  private static final int MAX_TOKEN_IDS = 256;
  private static final int WEIGHT_BYTES = 8;

  private Affinity() {}

  /** 32 bytes that requests with the same beginning share. {@code own}: the caller's key, in place of them; or empty. */
  static byte[] key(GenerateRequest request, String own) {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    if (!own.isEmpty()) {
      return sha256(own.getBytes(UTF_8));
    }
    addText(bytes, VERSION.getBytes(UTF_8));
    addText(bytes, request.getModel().getBytes(UTF_8));
    addText(bytes, request.getCacheSalt().getBytes(UTF_8));
    switch (request.getPromptCase()) {
      case MESSAGES:
        bytes.write('m');
        for (Message message : request.getMessages().getMessagesList()) {
          addText(bytes, message.getRole().getBytes(UTF_8));
          addText(bytes, message.getName().getBytes(UTF_8));
          addText(bytes, content(message).getBytes(UTF_8));
          if (message.getRole().equals("user")) {
            break;
          }
        }
        break;
      case TEXT:
        bytes.write('t');
        addText(bytes, beginning(request.getText()));
        break;
      case TOKEN_IDS:
        bytes.write('i');
        request.getTokenIds().getIdsList().stream().limit(MAX_TOKEN_IDS).forEach(id -> addUint32(bytes, id));
        break;
      default:
        break;
    }
    return sha256(bytes.toByteArray());
  }

  /** The addresses, that of the scheduler with the highest weight first. */
  static List<String> preference(byte[] key, List<String> addresses) {
    Map<String, byte[]> weights = new HashMap<>();
    addresses.forEach(address -> weights.put(address, weight(key, address.getBytes(UTF_8))));
    List<String> order = new ArrayList<>(addresses);
    order.sort(
        Comparator.<String, byte[]>comparing(weights::get, Arrays::compareUnsigned)
            .reversed()
            .thenComparing(address -> address.getBytes(UTF_8), Arrays::compareUnsigned));
    return order;
  }

  /**
   * The first of the order whose loads are within its share. One that says that it has none gets no more of the client's
   * calls for that.
   *
   * @param live the client's own calls at an address
   * @param reported the sequences of all clients there, as a directory has them
   */
  static String choice(List<String> order, ToLongFunction<String> live, ToLongFunction<String> reported) {
    long least = share(order, live);
    long most = share(order, reported);
    List<String> fewer = order.stream().filter(address -> live.applyAsLong(address) < least).toList();
    return fewer.stream().filter(address -> reported.applyAsLong(address) < most).findFirst().orElse(fewer.get(0));
  }

  /** 1.25 of the mean load with the new call, rounded up: who has as much gets no more. */
  private static long share(List<String> order, ToLongFunction<String> load) {
    long sum = order.stream().mapToLong(load).sum() + 1;
    return (5 * sum + 4L * order.size() - 1) / (4L * order.size());
  }

  private static byte[] weight(byte[] key, byte[] address) {
    byte[] both = Arrays.copyOf(key, key.length + address.length);
    System.arraycopy(address, 0, both, key.length, address.length);
    return Arrays.copyOf(sha256(both), WEIGHT_BYTES); // big-endian: in the order of their bytes
  }

  private static String content(Message message) {
    if (!message.getContent().isEmpty()) {
      return message.getContent();
    }
    return message.getPartsList().stream().map(part -> part.getText()).collect(Collectors.joining());
  }

  private static byte[] beginning(String text) {
    byte[] bytes = text.getBytes(UTF_8);
    int end = Math.min(bytes.length, MAX_TEXT_BYTES);
    while (end < bytes.length && (bytes[end] & 0xc0) == 0x80) {
      end--; // in the middle of a character
    }
    return Arrays.copyOf(bytes, end);
  }

  private static void addText(ByteArrayOutputStream bytes, byte[] text) {
    addUint32(bytes, text.length);
    bytes.write(text, 0, text.length);
  }

  private static void addUint32(ByteArrayOutputStream bytes, int value) {
    for (int shift = 0; shift < Integer.SIZE; shift += Byte.SIZE) {
      bytes.write(value >>> shift);
    }
  }

  private static byte[] sha256(byte[] bytes) {
    try {
      return MessageDigest.getInstance("SHA-256").digest(bytes);
    } catch (NoSuchAlgorithmException missing) {
      throw new IllegalStateException(missing); // every Java platform has it
    }
  }
}
