// Streams a completion: complete URL PROMPT [MAX_TOKENS]. Ctrl-C ends it: the daemon stops when the program has gone.
#include <cstdlib>
#include <iostream>
#include <string>

#include "ull/client.hpp"

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::cerr << "usage: complete URL PROMPT [MAX_TOKENS], such as complete ipc:///run/ull/ull.sock 'import os' 32\n";
    return 2;
  }
  try {
    ull::Client client(argv[1]);
    ull::Request request{.prompt = argv[2]};
    if (argc == 4) request.max_tokens = std::stoull(argv[3]);
    ull::Stream stream = client.generate(request);
    for (const ull::Tokens& tokens : stream) std::cout << tokens.text << std::flush;
    const ull::Result& result = stream.result();
    std::cerr << '\n' << result.usage.completion_tokens << " tokens, " << result.finish_reason << '\n';
    return 0;
  } catch (const ull::Refused& refused) {
    std::cerr << "refused (" << refused.code() << (refused.field ? ", " + *refused.field : "")
              << "): " << refused.what() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "complete: " << error.what() << '\n';
  }
  return 1;
}
