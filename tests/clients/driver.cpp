// Runs one scenario of the C++ client against a daemon: driver SCENARIO URL [TRANSPORT [ARGUMENT]]. What it saw it
// prints line by line, a name and values, for test_cpp_client.py.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ull/client.hpp"

namespace {

ull::ClientOptions g_options;

void print(const char* name, const ull::TokenIds& ids) {
  std::cout << name;
  for (const uint32_t id : ids) std::cout << ' ' << id;
  std::cout << '\n';
}

template <typename... Values>
void print(const char* name, const Values&... values) {
  std::cout << name;
  ((std::cout << ' ' << values), ...);
  std::cout << std::endl;
}

// Prints what a call throws: the code, and the field of what was refused.
void caught(const char* name, const std::function<void()>& call) {
  try {
    call();
    print(name, "nothing");
  } catch (const ull::Refused& refused) {
    print(name, "refused", refused.code(), refused.field.value_or("-"));
  } catch (const ull::Failed& failed) {
    print(name, "failed", failed.code());
  } catch (const ull::Error& error) {
    print(name, error.code());
    std::cerr << error.what() << '\n';
  }
}

void sampled(ull::Client& client, const std::string& seed) {
  ull::Request request{.prompt = "def add(first, second):\n", .max_tokens = 24, .temperature = 0.8};
  request.seed = std::stoull(seed);
  ull::Stream stream = client.generate(request);
  std::string text;
  ull::TokenIds ids;
  uint64_t frames = 0;
  for (const ull::Tokens& tokens : stream) {
    if (tokens.index != ids.size() || tokens.time_ns == 0) print("wrong", tokens.index);
    text += tokens.text;
    ids.insert(ids.end(), tokens.ids.begin(), tokens.ids.end());
    ++frames;
  }
  const ull::Result& result = stream.result();
  print("ids", result.token_ids);
  print("same", result.text == text && result.token_ids == ids && frames > 0);
  print("done", result.finish_reason, result.seed, result.usage.completion_tokens, result.bundle.size());
  print("rounds", result.done["speculation"]["rounds"].as_unsigned() > 0);
  print("after", stream.next().has_value());
}

void interleaved(ull::Client& client, const std::string&) {
  std::vector<ull::Stream> streams;
  for (int i = 0; i < 3; ++i) {
    streams.push_back(client.generate({.prompt = "item " + std::to_string(i), .max_tokens = 20}));
  }
  for (bool any = true; any;) {
    any = false;
    for (ull::Stream& stream : streams) any = stream.next().has_value() || any;
  }
  for (ull::Stream& stream : streams) print("ids", stream.result().token_ids);
}

void cancelled(ull::Client& client, const std::string&) {
  ull::Stream stream = client.generate({.prompt = "a", .max_tokens = 4000, .extra = {{"ignore_eos", true}}});
  (void)stream.next();
  stream.cancel();
  print("done", stream.result().finish_reason);
  {
    ull::Stream dropped = client.generate({.prompt = "b", .max_tokens = 4000, .extra = {{"ignore_eos", true}}});
    for (const ull::Tokens& tokens : dropped) {
      if (tokens.index > 2) break;
    }
  }
  print("then", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
}

void sessions(ull::Client& client, const std::string&) {
  ull::Session session = client.open_session();
  const uint64_t read = session.append({.prompt = "def add(first, second):\n"});
  const ull::Result first = session.complete({.prompt = "    return ", .max_tokens = 8});
  print("cached", first.usage.cached_tokens >= read - 1, first.usage.prompt_tokens > read);
  const uint64_t held = first.usage.prompt_tokens + first.usage.completion_tokens;
  ull::Session fork = session.fork();
  print("rolled", fork.rollback(2) == held - 2);
  print("cut", session.truncate_to_tokens(3) == held - 5);
  print("cut", session.truncate_to_characters(0) == held - 8);
  print("closed", fork.close() == held - 2);
  caught("gone", [&] { fork.rollback(1); });
  caught("bad", [&] { session.rollback(100000); });
}

void held(ull::Client& client, const std::string&) {
  ull::Session session = client.open_session();
  ull::Stream stream = session.generate({.prompt = "def add(", .max_tokens = 6, .hold = true});
  stream.commit();
  print("done", stream.result().finish_reason, stream.result().token_ids.size());
  caught("again", [&] { stream.commit(); });
}

void exact(ull::Client& client, const std::string&) {
  const ull::Result label = client.complete({.prompt = "The answer is", .choices = {" yes", " no", " maybe"}});
  print("choice", label.choice->index, label.choice->probabilities.size(), label.choice->margin >= 0);
  const ull::Value schema = ull::Value::Map{
      {"type", "object"},
      {"properties", ull::Value::Map{{"n", ull::Value::Map{{"type", "integer"}, {"maximum", 9}, {"minimum", 0}}}}},
      {"required", ull::Value::List{"n"}},
      {"additionalProperties", false}};
  print("json", client.complete({.prompt = "x", .max_tokens = 40, .json_schema = schema}).text);
  print("regex", client.complete({.prompt = "x", .max_tokens = 8, .regex = "(up|down)"}).finish_reason);
  ull::Stream stream = client.generate({.prompt = "x", .max_tokens = 2, .logit_bias = {{77, -5.0}}, .logprobs = 2});
  for (const ull::Tokens& tokens : stream) {
    for (const ull::Logprob& entry : tokens.logprobs)
      print("top", entry.top.size(), entry.top[0].second >= entry.logprob);
  }
  const ull::TokenIds prompt = client.tokenize({.prompt = "import os\nimport sys\n"});
  const ull::Result scored = client.complete(
      {.token_ids = prompt, .max_tokens = 2, .prompt_logprobs = true, .prompt_top_logprobs = uint64_t{2}});
  print("prompt", scored.prompt_logprobs.size() + 1 == prompt.size(), scored.prompt_logprobs.at(0) < 0,
        scored.token_ids.size());
  const auto whole = [](const ull::TopLogprobs& top) { return top.size() == 2 && top[0].second >= top[1].second; };
  const bool all = std::all_of(scored.prompt_top_logprobs.begin(), scored.prompt_top_logprobs.end(), whole);
  print("likeliest", scored.prompt_top_logprobs.size() == scored.prompt_logprobs.size(), all,
        scored.prompt_top_logprobs.at(0).at(0).first);
}

void texts(ull::Client& client, const std::string&) {
  const ull::TokenIds ids = client.tokenize({.prompt = "import os"});
  print("ids", ids);
  print("count", client.count_tokens({.prompt = "import os"}) == ids.size());
  print("text", client.detokenize(ids));
  const std::vector<ull::Message> chat{{"user", "Tell me of Rome."}};
  print("chat", client.complete({.messages = chat, .max_tokens = 4}).usage.completion_tokens);
  print("health", client.health()["status"].as_text());
  print("info", client.info()["limits"]["context"].as_unsigned() > 0);
  print("stats", client.stats()["requests"]["accepted"].as_unsigned() > 0);
}

void wrong(ull::Client& client, const std::string&) {
  const auto refuse = [&](const char* name, const ull::Request& request) {
    caught(name, [&] { client.complete(request); });
  };
  refuse("nothing", {});
  refuse("both", {.prompt = "a", .token_ids = ull::TokenIds{1}});
  refuse("hot", {.prompt = "a", .temperature = -1.0});
  refuse("type", {.prompt = "a", .extra = {{"top_k", "many"}}});
  refuse("unknown", {.prompt = "a", .strict = true, .extra = {{"colour", "red"}}});
  refuse("long", {.prompt = std::string(100000, 'x')});
  refuse("regex", {.prompt = "a", .regex = "("});
  refuse("late", {.prompt = "a", .max_tokens = 900, .deadline_ms = 1});
  caught("session", [&] { client.open_session().rollback(1); });
  print("then", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
  print("warned", client.complete({.prompt = "c", .max_tokens = 1, .extra = {{"colour", "red"}}}).warnings.at(0));
  caught("unread", [&] {
    ull::Stream stream = client.generate({.max_tokens = 1});
    try {
      (void)stream.next();
    } catch (const ull::Refused&) {
    }
    (void)stream.result();
  });
}

// No UTF-8.
void bytes(ull::Client& client, const std::string&) {
  caught("bytes", [&] { client.complete({.prompt = "\xFF\xFE"}); });
  print("then", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
}

// Prints "reading" once there are tokens: then the daemon is killed. A line on stdin says that there is a new one.
void killed(ull::Client& client, const std::string&) {
  ull::Session session = client.open_session();
  ull::Stream stream = client.generate({.prompt = "a", .max_tokens = 100000, .extra = {{"ignore_eos", true}}});
  (void)stream.next();
  print("reading");
  caught("stream", [&] { (void)stream.result(); });
  caught("over", [&] { (void)stream.next(); });
  caught("session", [&] { (void)session.rollback(0); });
  std::string line;
  std::getline(std::cin, line);
  print("then", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
  caught("old", [&] { (void)session.complete({.prompt = "c"}); });
}

// A message of more bytes than the daemon takes.
void too_long(ull::Client& client, const std::string&) {
  caught("long",
         [&] { client.complete({.prompt = std::string(15'000'000, 'x'), .extra = {{"a", std::string(9000, 'y')}}}); });
  print("then", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
}

// Nothing is under way while the daemon makes room for another one: a line on stdin says that it has.
void idle(ull::Client& client, const std::string&) {
  print("first", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
  std::string line;
  std::getline(std::cin, line);
  print("then", client.complete({.prompt = "c", .max_tokens = 3}).finish_reason);
}

// Reads a while after everything has been sent.
void late(ull::Client& client, const std::string&) {
  ull::Stream stream = client.generate({.prompt = "a"});
  (void)stream.next();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  print("text", stream.result().text);
  caught("health", [&] { (void)client.health(); });
}

// Whatever the daemon makes of a request.
void one(ull::Client& client, const std::string&) {
  caught("one", [&] { print("text", client.complete({.prompt = "a"}).text); });
  caught("health", [&] { (void)client.health(); });
}

void nobody(ull::Client& client, const std::string&) {
  caught("health", [&] { (void)client.health(); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "default") {
    print("url", ull::default_url());
    return 0;
  }
  const std::map<std::string, void (*)(ull::Client&, const std::string&)> scenarios{
      {"sampled", sampled},     {"interleaved", interleaved},
      {"cancelled", cancelled}, {"sessions", sessions},
      {"held", held},           {"exact", exact},
      {"texts", texts},         {"wrong", wrong},
      {"killed", killed},       {"one", one},
      {"too_long", too_long},   {"idle", idle},
      {"late", late},           {"bytes", bytes},
      {"nobody", nobody}};
  const std::map<std::string, ull::TransportKind> transports{{"auto", ull::TransportKind::kAuto},
                                                             {"local", ull::TransportKind::kLocal},
                                                             {"zeromq", ull::TransportKind::kZeroMq}};
  if (argc < 3) return 2;
  g_options.transport = argc > 3 ? transports.at(argv[3]) : ull::TransportKind::kAuto;
  if (std::string(argv[1]) == "one" || std::string(argv[1]) == "nobody") {
    g_options.silence_timeout = std::chrono::milliseconds(1500);
    g_options.connect_timeout = std::chrono::milliseconds(1500);
  }
  if (const char* const keys = std::getenv("ULL_TEST_KEYS"); keys != nullptr) {
    std::istringstream words(keys);
    g_options.keys.emplace();
    words >> g_options.keys->server_key >> g_options.keys->public_key >> g_options.keys->secret_key;
  }
  ull::Client client(argv[2], g_options);
  scenarios.at(argv[1])(client, argc > 4 ? argv[4] : "");
}
