#include "io/zmq_api.h"

#include <dlfcn.h>

#include <stdexcept>

namespace ull::zmq {

Api load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) throw std::runtime_error("libzmq: " + path + " is not loaded in this process");
  Api api{};
  // Never dlclosed: the handle keeps pyzmq's library in place for as long as a socket may exist.
  const auto find = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error("libzmq: " + path + " has no " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(api.socket, "zmq_socket");
  find(api.close, "zmq_close");
  find(api.setsockopt, "zmq_setsockopt");
  find(api.bind, "zmq_bind");
  find(api.send, "zmq_send");
  find(api.msg_init, "zmq_msg_init");
  find(api.msg_init_size, "zmq_msg_init_size");
  find(api.msg_close, "zmq_msg_close");
  find(api.msg_recv, "zmq_msg_recv");
  find(api.msg_send, "zmq_msg_send");
  find(api.msg_more, "zmq_msg_more");
  find(api.socket_monitor, "zmq_socket_monitor");
  find(api.msg_data, "zmq_msg_data");
  find(api.msg_size, "zmq_msg_size");
  find(api.poll, "zmq_poll");
  find(api.error, "zmq_errno");
  find(api.error_text, "zmq_strerror");
  return api;
}

void fail(const Api& api, const std::string& what) {
  throw std::runtime_error(what + ": " + api.error_text(api.error()));
}

}  // namespace ull::zmq
