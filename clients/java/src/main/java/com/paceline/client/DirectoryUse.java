package com.paceline.client;

/** Which schedulers of a directory a client uses: {@link Client.Builder#directory}. */
public enum DirectoryUse {
  /** None. */
  OFF,
  /** Over TLS, by the client's own authority and under the name that the directory has for each; or on loopback. */
  SAFE,
  /** Without TLS elsewhere too, if the client has none. */
  ANY
}
