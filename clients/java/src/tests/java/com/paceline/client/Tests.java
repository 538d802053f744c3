package com.paceline.client;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Objects;
import java.util.logging.Level;
import java.util.logging.Logger;

/**
 * Runs the tests: the methods without arguments of these classes that are not private, each with an object of its own.
 * Exits with 1 after the first one that fails.
 */
final class Tests {
  private static final Logger GRPC = Logger.getLogger("io.grpc"); // it reports what attackers send

  private static final List<Class<?>> CLASSES =
      List.of(DirectoryTest.class, RotationTest.class, LookTest.class, HostileTest.class);

  private Tests() {}

  public static void main(String[] arguments) throws ReflectiveOperationException {
    GRPC.setLevel(Level.OFF);
    int count = 0;
    for (Class<?> tests : CLASSES) {
      Method[] methods = tests.getDeclaredMethods();
      Arrays.sort(methods, Comparator.comparing(Method::getName));
      for (Method test : methods) {
        boolean isTest = test.getParameterCount() == 0 && !test.isSynthetic();
        if (isTest && (test.getModifiers() & (Modifier.PRIVATE | Modifier.STATIC)) == 0) {
          run(test);
          count++;
        }
      }
    }
    System.out.println(count + " tests passed");
    System.exit(0);
  }

  private static void run(Method test) throws ReflectiveOperationException {
    Object tests = test.getDeclaringClass().getDeclaredConstructor().newInstance();
    try {
      test.invoke(tests);
    } catch (InvocationTargetException failed) {
      System.err.println(test.getDeclaringClass().getSimpleName() + "." + test.getName() + " failed");
      failed.getCause().printStackTrace();
      System.exit(1);
    }
  }

  /** Throws unless both are equal. */
  static void same(Object found, Object expected, Object what) {
    check(Objects.equals(found, expected), what + ": " + found + ", not " + expected);
  }

  static void check(boolean is, Object what) {
    if (!is) {
      throw new AssertionError(what);
    }
  }
}
