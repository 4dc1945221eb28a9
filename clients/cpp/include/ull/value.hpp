// What a field of a message holds, as docs/wire.md has them: nil, booleans, numbers, texts, lists and maps.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#ifndef MSGPACK_NO_BOOST
#define MSGPACK_NO_BOOST
#endif
#include <msgpack.hpp>

#include "ull/error.hpp"

#if __has_include(<nlohmann/json.hpp>)
#include <nlohmann/json.hpp>
#define ULL_HAS_NLOHMANN_JSON 1
#endif

namespace ull {

// A value of a message. Numbers that are not negative are uint64_t; maps have texts for keys (daemons take them for
// integers too), and keep no order.
class Value {
 public:
  using List = std::vector<Value>;
  using Map = std::map<std::string, Value, std::less<>>;

  Value() = default;
  Value(std::nullptr_t) {}
  Value(bool value) : held_(value) {}
  template <typename Number>
    requires(std::is_integral_v<Number> && !std::is_same_v<Number, bool>)
  Value(Number value) {
    if (value < 0) {
      held_ = static_cast<int64_t>(value);
    } else {
      held_ = static_cast<uint64_t>(value);
    }
  }
  Value(double value) : held_(value) {}
  Value(const char* value) : held_(std::string(value)) {}
  Value(std::string_view value) : held_(std::string(value)) {}
  Value(std::string value) : held_(std::move(value)) {}
  Value(List value) : held_(std::move(value)) {}
  Value(Map value) : held_(std::move(value)) {}
  template <typename Item>
  Value(const std::vector<Item>& items) : held_(List(items.begin(), items.end())) {}

#ifdef ULL_HAS_NLOHMANN_JSON
  // Of a JSON value, such as a schema.
  Value(const nlohmann::json& json) {
    if (json.is_boolean()) {
      held_ = json.get<bool>();
    } else if (json.is_number_unsigned()) {
      held_ = json.get<uint64_t>();
    } else if (json.is_number_integer()) {
      held_ = json.get<int64_t>();
    } else if (json.is_number()) {
      held_ = json.get<double>();
    } else if (json.is_string()) {
      held_ = json.get<std::string>();
    } else if (json.is_array()) {
      held_ = List(json.begin(), json.end());
    } else if (json.is_object()) {
      Map map;
      for (const auto& [key, value] : json.items()) map.emplace(key, Value(value));
      held_ = std::move(map);
    }
  }
#endif

  [[nodiscard]] bool is_nil() const { return std::holds_alternative<std::monostate>(held_); }
  [[nodiscard]] bool is_map() const { return std::holds_alternative<Map>(held_); }

  // What it holds. Each throws ProtocolError where it is of another type.
  [[nodiscard]] bool as_bool() const { return get<bool>("a boolean"); }
  [[nodiscard]] const std::string& as_text() const { return get<std::string>("a text"); }
  [[nodiscard]] const List& as_list() const { return get<List>("a list"); }
  [[nodiscard]] const Map& as_map() const { return get<Map>("a map"); }
  [[nodiscard]] uint64_t as_unsigned() const { return get<uint64_t>("an integer from 0"); }
  [[nodiscard]] double as_number() const {
    if (const auto* number = std::get_if<double>(&held_)) return *number;
    if (const auto* number = std::get_if<int64_t>(&held_)) return static_cast<double>(*number);
    return static_cast<double>(get<uint64_t>("a number"));
  }

  // A field of a map; nil where it is missing. Throws ProtocolError for what is no map.
  [[nodiscard]] const Value& operator[](std::string_view key) const {
    static const Value nil;
    const Map& map = as_map();
    const auto found = map.find(key);
    return found == map.end() ? nil : found->second;
  }

  template <typename Packer>
  void pack(Packer& packer) const {
    std::visit([&](const auto& held) { pack_one(packer, held); }, held_);
  }

  // Of what msgpack has unpacked; lists and maps as deep as that is.
  [[nodiscard]] static Value of(const msgpack::object& object) {
    switch (object.type) {
      case msgpack::type::NIL:
        return {};
      case msgpack::type::BOOLEAN:
        return object.via.boolean;
      case msgpack::type::POSITIVE_INTEGER:
        return object.via.u64;
      case msgpack::type::NEGATIVE_INTEGER:
        return object.via.i64;
      case msgpack::type::FLOAT32:
      case msgpack::type::FLOAT64:
        return object.via.f64;
      case msgpack::type::STR:
        return std::string(object.via.str.ptr, object.via.str.size);
      case msgpack::type::ARRAY: {
        List list;
        list.reserve(object.via.array.size);
        for (uint32_t i = 0; i < object.via.array.size; ++i) list.push_back(of(object.via.array.ptr[i]));
        return list;
      }
      case msgpack::type::MAP: {
        Map map;
        for (uint32_t i = 0; i < object.via.map.size; ++i) {
          const auto& entry = object.via.map.ptr[i];
          map.insert_or_assign(key_of(entry.key), of(entry.val));
        }
        return map;
      }
      default:
        throw ProtocolError("a message holds a value of no type that docs/wire.md has");
    }
  }

 private:
  template <typename Held>
  const Held& get(const char* what) const {
    if (const auto* held = std::get_if<Held>(&held_)) return *held;
    throw ProtocolError(std::string("a field of a message is not ") + what);
  }

  static std::string key_of(const msgpack::object& key) {
    if (key.type == msgpack::type::STR) return {key.via.str.ptr, key.via.str.size};
    if (key.type == msgpack::type::POSITIVE_INTEGER) return std::to_string(key.via.u64);
    throw ProtocolError("a map of a message has a key that is no text");
  }

  template <typename Packer>
  static void pack_one(Packer& packer, std::monostate) {
    packer.pack_nil();
  }
  template <typename Packer>
  static void pack_one(Packer& packer, const List& list) {
    packer.pack_array(static_cast<uint32_t>(list.size()));
    for (const Value& item : list) item.pack(packer);
  }
  template <typename Packer>
  static void pack_one(Packer& packer, const Map& map) {
    packer.pack_map(static_cast<uint32_t>(map.size()));
    for (const auto& [key, value] : map) {
      packer.pack(key);
      value.pack(packer);
    }
  }
  template <typename Packer, typename Scalar>
  static void pack_one(Packer& packer, const Scalar& scalar) {
    packer.pack(scalar);
  }

  std::variant<std::monostate, bool, uint64_t, int64_t, double, std::string, List, Map> held_;
};

}  // namespace ull
