package com.paceline.client;

import static java.nio.charset.StandardCharsets.UTF_8;

import com.paceline.scheduler.v1.GenerateRequest;
import com.paceline.scheduler.v1.Message;
import java.io.ByteArrayOutputStream;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

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

  /** The indexes of the addresses, that of the scheduler with the highest weight first. */
  static List<Integer> preference(byte[] key, List<String> addresses) {
    List<byte[]> names = addresses.stream().map(address -> address.getBytes(UTF_8)).collect(Collectors.toList());
    List<byte[]> weights = names.stream().map(name -> weight(key, name)).collect(Collectors.toList());
    return IntStream.range(0, addresses.size())
        .boxed()
        .sorted(
            Comparator.<Integer, byte[]>comparing(weights::get, Arrays::compareUnsigned)
                .reversed()
                .thenComparing(names::get, Arrays::compareUnsigned))
        .collect(Collectors.toList());
  }

  /** The first of the order whose load is within its share. {@code loads}: the client's live calls, by address. */
  static int choice(List<Integer> order, int[] loads) {
    int sum = IntStream.of(loads).sum() + 1;
    int bound = (5 * sum + 4 * loads.length - 1) / (4 * loads.length); // rounded up
    return order.stream().filter(address -> loads[address] < bound).findFirst().orElseThrow();
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
