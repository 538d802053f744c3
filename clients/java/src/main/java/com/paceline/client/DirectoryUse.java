package com.paceline.client;

/** Which of those schedulers a client uses too that the given ones list in their directory: {@link Client.Builder#directory}. */
public enum DirectoryUse {
  /** None. */
  OFF,
  /** Over TLS, by the client's own authority and under the name that the directory has for each; or on loopback. */
  SAFE,
  /** Without TLS elsewhere too, if the client has none. */
  ANY
}
