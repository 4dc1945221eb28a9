// Reads back what io/msgpack.h writes, for tests. Throws std::runtime_error on anything else, or on leftovers.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ull::test {

struct Value {
  enum Kind { kNil, kBoolean, kInteger, kReal, kText, kArray, kMap } kind = kNil;
  uint64_t integer = 0;  // booleans too
  double real = 0;
  std::string text;  // binary too
  std::vector<Value> items;
  std::map<std::string, Value> members;

  [[nodiscard]] const Value& operator[](const std::string& name) const { return members.at(name); }
};

class MsgpackReader {
 public:
  static Value read(std::string_view bytes) {
    MsgpackReader reader(bytes);
    Value value = reader.value();
    if (!reader.bytes_.empty()) throw std::runtime_error("msgpack: leftovers");
    return value;
  }

 private:
  explicit MsgpackReader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(size_t count) {
    if (count > bytes_.size()) throw std::runtime_error("msgpack: truncated");
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  uint64_t number(size_t size) {
    uint64_t value = 0;
    for (const char byte : take(size)) value = value << 8 | static_cast<uint8_t>(byte);
    return value;
  }

  Value value() {
    Value out;
    const auto tag = static_cast<uint8_t>(take(1)[0]);
    if (tag < 0x80) return integer(tag);
    if (tag < 0x90) return map(tag & 0x0F);
    if (tag < 0xA0) return array(tag & 0x0F);
    if (tag < 0xC0) return text(tag & 0x1F);
    switch (tag) {
      case 0xC0:
        return out;
      case 0xC2:
      case 0xC3:
        out = integer(tag & 1);
        out.kind = Value::kBoolean;
        return out;
      case 0xC4:
        return text(number(1));
      case 0xC5:
        return text(number(2));
      case 0xC6:
        return text(number(4));
      case 0xCA:
        out.kind = Value::kReal;
        out.real = std::bit_cast<float>(static_cast<uint32_t>(number(4)));
        return out;
      case 0xCB:
        out.kind = Value::kReal;
        out.real = std::bit_cast<double>(number(8));
        return out;
      case 0xCC:
        return integer(number(1));
      case 0xCD:
        return integer(number(2));
      case 0xCE:
        return integer(number(4));
      case 0xCF:
        return integer(number(8));
      case 0xD9:
        return text(number(1));
      case 0xDA:
        return text(number(2));
      case 0xDB:
        return text(number(4));
      case 0xDC:
        return array(number(2));
      case 0xDD:
        return array(number(4));
      case 0xDE:
        return map(number(2));
      default:
        throw std::runtime_error("msgpack: unexpected tag");
    }
  }

  static Value integer(uint64_t number) {
    Value out;
    out.kind = Value::kInteger;
    out.integer = number;
    return out;
  }
  Value text(size_t size) {
    Value out;
    out.kind = Value::kText;
    out.text = take(size);
    return out;
  }
  Value array(size_t count) {
    Value out;
    out.kind = Value::kArray;
    for (size_t i = 0; i < count; ++i) out.items.push_back(value());
    return out;
  }
  Value map(size_t count) {
    Value out;
    out.kind = Value::kMap;
    for (size_t i = 0; i < count; ++i) {
      std::string name = value().text;
      out.members[std::move(name)] = value();
    }
    return out;
  }

  std::string_view bytes_;
};

}  // namespace ull::test
