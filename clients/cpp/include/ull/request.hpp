// What is asked for and what comes back, with the names of docs/wire.md.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ull/value.hpp"

namespace ull {

using TokenIds = std::vector<uint32_t>;

// One turn of a chat. `content` is left out where it is nil; `extra` has other fields, such as tool_calls.
struct Message {
  std::string role;
  std::optional<std::string> content = std::nullopt;
  Value::Map extra = {};
};

// A completion, by exactly one of `prompt`, `messages` and `token_ids` (in a session none is needed where it holds
// something). What is not set has the daemon's default. `extra` takes every other field of `generate` by its name:
// tools, documents, chat_template_kwargs and so on.
struct Request {
  std::optional<std::string> prompt = std::nullopt;
  std::optional<std::vector<Message>> messages = std::nullopt;
  std::optional<TokenIds> token_ids = std::nullopt;
  std::optional<bool> special_tokens = std::nullopt;
  std::optional<uint64_t> max_tokens = std::nullopt;
  std::optional<double> temperature = std::nullopt;
  std::optional<uint64_t> top_k = std::nullopt;
  std::optional<double> top_p = std::nullopt;
  std::optional<double> min_p = std::nullopt;
  std::optional<uint64_t> seed = std::nullopt;
  std::vector<std::string> stop = {};
  TokenIds stop_ids = {};
  std::map<uint32_t, double> logit_bias = {};
  std::optional<uint64_t> logprobs = std::nullopt;
  std::optional<bool> prompt_logprobs = std::nullopt;
  std::optional<uint64_t> prompt_top_logprobs = std::nullopt;
  std::vector<std::string> choices = {};
  std::optional<Value> json_schema = std::nullopt;
  std::optional<std::string> regex = std::nullopt;
  std::optional<std::string> lark = std::nullopt;
  std::optional<bool> json_object = std::nullopt;
  std::optional<uint64_t> timeout_ms = std::nullopt;
  std::optional<uint64_t> deadline_ms = std::nullopt;
  std::optional<std::string> priority = std::nullopt;
  std::optional<bool> hold = std::nullopt;
  std::optional<std::string> speculate = std::nullopt;
  std::optional<bool> strict = std::nullopt;
  Value::Map extra = {};
};

using TopLogprobs = std::vector<std::pair<uint32_t, double>>;  // the likeliest tokens, likeliest first

struct Logprob {
  uint32_t token = 0;
  double logprob = 0;
  TopLogprobs top = {};
};

// The tokens of one round, or of several where one side fell behind.
struct Tokens {
  uint64_t index = 0;  // of the first of `ids` in the completion
  TokenIds ids = {};
  std::string text = {};  // whole characters; may be empty
  uint64_t time_ns = 0;   // CLOCK_MONOTONIC of the daemon's machine, when the first of them was accepted
  std::vector<Logprob> logprobs = {};
};

struct Usage {
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t completion_tokens = 0;
  uint64_t rolled_back_tokens = 0;
};

struct Choice {
  uint64_t index = 0;
  std::vector<double> logprobs = {};
  std::vector<double> probabilities = {};
  double margin = 0;
};

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON of an object
};

// A whole completion. `done` is the daemon's last message with all of its fields: timeline, speculation and so on.
struct Result {
  std::string text = {};
  TokenIds token_ids = {};
  std::vector<double> prompt_logprobs = {};           // where they were asked for: [i] of the prompt's token i + 1
  std::vector<TopLogprobs> prompt_top_logprobs = {};  // likewise: the likeliest tokens in its place
  std::string finish_reason = {};
  Usage usage = {};
  uint64_t seed = 0;
  std::string bundle = {};
  std::optional<Choice> choice = std::nullopt;
  std::vector<ToolCall> tool_calls = {};
  std::vector<std::string> warnings = {};
  Value done = {};
};

namespace detail {

template <typename Field>
void put(Value::Map& map, const char* name, const std::optional<Field>& field) {
  if (field) map.insert_or_assign(name, Value(*field));
}
template <typename Item>
void put(Value::Map& map, const char* name, const std::vector<Item>& items) {
  if (!items.empty()) map.insert_or_assign(name, Value(items));
}

inline Value as_value(const std::vector<Message>& messages) {
  Value::List list;
  for (const Message& message : messages) {
    Value::Map map = message.extra;
    map.insert_or_assign("role", message.role);
    put(map, "content", message.content);
    list.emplace_back(std::move(map));
  }
  return list;
}

inline Value::Map fields_of(const Request& request) {
  Value::Map map = request.extra;
  put(map, "prompt", request.prompt);
  if (request.messages) map.insert_or_assign("messages", as_value(*request.messages));
  put(map, "token_ids", request.token_ids);
  put(map, "special_tokens", request.special_tokens);
  put(map, "max_tokens", request.max_tokens);
  put(map, "temperature", request.temperature);
  put(map, "top_k", request.top_k);
  put(map, "top_p", request.top_p);
  put(map, "min_p", request.min_p);
  put(map, "seed", request.seed);
  put(map, "stop", request.stop);
  put(map, "stop_ids", request.stop_ids);
  if (!request.logit_bias.empty()) {
    Value::Map bias;
    for (const auto& [token, value] : request.logit_bias) bias.emplace(std::to_string(token), value);
    map.insert_or_assign("logit_bias", std::move(bias));
  }
  put(map, "logprobs", request.logprobs);
  put(map, "prompt_logprobs", request.prompt_logprobs);
  put(map, "prompt_top_logprobs", request.prompt_top_logprobs);
  put(map, "choices", request.choices);
  put(map, "json_schema", request.json_schema);
  put(map, "regex", request.regex);
  put(map, "lark", request.lark);
  put(map, "json_object", request.json_object);
  put(map, "timeout_ms", request.timeout_ms);
  put(map, "deadline_ms", request.deadline_ms);
  put(map, "priority", request.priority);
  put(map, "hold", request.hold);
  put(map, "speculate", request.speculate);
  put(map, "strict", request.strict);
  return map;
}

inline uint32_t token_id(const Value& value) {
  const uint64_t id = value.as_unsigned();
  if (id > std::numeric_limits<uint32_t>::max()) throw ProtocolError("a token id is " + std::to_string(id));
  return static_cast<uint32_t>(id);
}

inline TokenIds ids_of(const Value& value) {
  TokenIds ids;
  for (const Value& id : value.as_list()) ids.push_back(token_id(id));
  return ids;
}

inline std::vector<double> numbers_of(const Value& value) {
  std::vector<double> numbers;
  for (const Value& number : value.as_list()) numbers.push_back(number.as_number());
  return numbers;
}

inline uint64_t unsigned_or(const Value& value, uint64_t otherwise) {
  return value.is_nil() ? otherwise : value.as_unsigned();
}

inline TopLogprobs top_of(const Value& pairs) {
  TopLogprobs top;
  for (const Value& pair : pairs.as_list()) {
    if (pair.as_list().size() != 2) throw ProtocolError("an entry of `top` is no pair");
    top.emplace_back(token_id(pair.as_list()[0]), pair.as_list()[1].as_number());
  }
  return top;
}

inline Tokens tokens_of(const Value& message) {
  Tokens tokens{message["index"].as_unsigned(),
                ids_of(message["ids"]),
                message["text"].as_text(),
                message["time_ns"].as_unsigned(),
                {}};
  if (const Value& logprobs = message["logprobs"]; !logprobs.is_nil()) {
    for (const Value& entry : logprobs.as_list()) {
      Logprob found{token_id(entry["token"]), entry["logprob"].as_number(), {}};
      if (!entry["top"].is_nil()) found.top = top_of(entry["top"]);
      tokens.logprobs.push_back(std::move(found));
    }
  }
  return tokens;
}

// Appends what is said of the prompt's tokens, of which the first has none.
inline void add_prompt_logprobs(Result& result, const Value& message) {
  std::vector<double>& found = result.prompt_logprobs;
  if (message["index"].as_unsigned() != found.size() + 1) {
    throw ProtocolError("log-probabilities of a prompt do not go on from those before");
  }
  const std::vector<double> more = numbers_of(message["logprobs"]);
  found.insert(found.end(), more.begin(), more.end());
  if (const Value& top = message["top"]; !top.is_nil()) {
    if (top.as_list().size() != more.size()) throw ProtocolError("not each token of a prompt has its `top`");
    for (const Value& each : top.as_list()) result.prompt_top_logprobs.push_back(top_of(each));
  }
}

// Fills in what `done` says; the text and the ids have come before.
inline void finish(Result& result, Value done) {
  result.finish_reason = done["finish_reason"].as_text();
  const Value& usage = done["usage"];
  result.usage = {usage["prompt_tokens"].as_unsigned(), usage["cached_tokens"].as_unsigned(),
                  usage["completion_tokens"].as_unsigned(), unsigned_or(usage["rolled_back_tokens"], 0)};
  result.seed = done["seed"].as_unsigned();
  if (!done["bundle"].is_nil()) result.bundle = done["bundle"].as_text();
  if (const Value& choice = done["choice"]; !choice.is_nil()) {
    result.choice = Choice{choice["index"].as_unsigned(), numbers_of(choice["logprobs"]),
                           numbers_of(choice["probabilities"]), choice["margin"].as_number()};
  }
  if (const Value& calls = done["tool_calls"]; !calls.is_nil()) {
    for (const Value& call : calls.as_list()) {
      result.tool_calls.push_back({call["id"].as_text(), call["name"].as_text(), call["arguments"].as_text()});
    }
  }
  if (const Value& warnings = done["warnings"]; !warnings.is_nil()) {
    for (const Value& warning : warnings.as_list()) result.warnings.push_back(warning.as_text());
  }
  result.done = std::move(done);
}

}  // namespace detail
}  // namespace ull
