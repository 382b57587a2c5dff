// Turns a function into an op of `torch.ops.fastformer_cpp` with PyTorch's stable C functions. FASTFORMER_OP(function)
// registers it under its own name. Its type determines the schema; a parameter of type `Tensor&` is written to.
//
// std::out_of_range becomes IndexError in Python, std::invalid_argument becomes ValueError (from PyTorch 2.15 on,
// RuntimeError: see _cpp_call in fastformer/ops/decode_attention.py), and other exceptions become RuntimeError.

#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "common/tensor.h"

namespace fastformer {

// Takes an argument from the stack of a call.
template <typename T>
struct Argument {
  static T take(StableIValue value) { return torch::stable::detail::to<T>(value); }
};

template <>
struct Argument<Tensor> {
  static Tensor take(StableIValue value) { return Tensor(torch::stable::detail::to<AtenTensorHandle>(value)); }
};

template <>
struct Argument<OptionalTensor> {
  static OptionalTensor take(StableIValue value) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return handle ? OptionalTensor(Tensor(*handle)) : std::nullopt;
  }
};

template <>
struct Argument<ScalarType> {
  static ScalarType take(StableIValue value) {
    return static_cast<ScalarType>(torch::stable::detail::to<int32_t>(value));
  }
};

// Replaces PyTorch's conversion, which leaks the string.
template <>
struct Argument<std::string> {
  static std::string take(StableIValue value) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* text = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
    std::string result(text, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return result;
  }
};

template <typename T>
struct Argument<std::vector<T>> {
  static std::vector<T> take(StableIValue value) {
    const auto list = torch::stable::detail::to<StableListHandle>(value);
    size_t size = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    std::vector<T> result;
    result.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element{};
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
      result.push_back(Argument<T>::take(element));
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
    return result;
  }
};

inline StableIValue as_result(int64_t x) { return torch::stable::detail::from(x); }
inline StableIValue as_result(const Tensor& t) { return torch::stable::detail::from(t.release()); }
inline StableIValue as_result(const OptionalTensor& t) {
  return torch::stable::detail::from(t ? std::make_optional(t->release()) : std::nullopt);
}

// The type that holds an argument while the function runs.
template <typename T>
using Kept =
    std::conditional_t<std::is_same_v<std::remove_cvref_t<T>, std::string_view>, std::string, std::remove_cvref_t<T>>;

template <auto function, typename Results, typename... Arguments, size_t... i>
void call_boxed(StableIValue* stack, Results (*)(Arguments...), std::index_sequence<i...>) {
  std::tuple<Kept<Arguments>...> arguments{Argument<Kept<Arguments>>::take(stack[i])...};  // from left to right
  if constexpr (std::is_void_v<Results>) {
    std::apply(function, arguments);
  } else {
    const Results results = std::apply(function, arguments);
    if constexpr (requires { std::tuple_size<Results>::value; })
      [&]<size_t... r>(std::index_sequence<r...>) {
        ((stack[r] = as_result(std::get<r>(results))), ...);
      }(std::make_index_sequence<std::tuple_size_v<Results>>{});
    else stack[0] = as_result(results);
  }
}

template <typename Results, typename... Arguments>
constexpr size_t arity(Results (*)(Arguments...)) {
  return sizeof...(Arguments);
}

template <auto function>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  call_boxed<function>(stack, function, std::make_index_sequence<arity(function)>{});
}

// Returns the name of a type in a schema.
template <typename T>
std::string schema_type() {
  if constexpr (std::is_same_v<T, Tensor>) return "Tensor";
  else if constexpr (std::is_same_v<T, ScalarType>) return "ScalarType";
  else if constexpr (std::is_same_v<T, std::string>) return "str";
  else if constexpr (std::is_same_v<T, double>) return "float";
  else if constexpr (std::is_same_v<T, int64_t>) return "int";
  else if constexpr (std::is_same_v<T, bool>) return "bool";
  else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::string types;
    [&]<typename... Each>(std::tuple<Each...>*) {
      (types.append(types.empty() ? "(" : ", ").append(schema_type<Each>()), ...);
    }(static_cast<T*>(nullptr));
    return types.append(")");
  } else if constexpr (std::is_same_v<T, std::optional<typename T::value_type>>)
    return schema_type<typename T::value_type>().append("?");
  else return schema_type<typename T::value_type>().append("[]");
}

// Returns the schema of a function.
template <typename Results, typename... Arguments>
std::string schema_of(std::string schema, Results (*)(Arguments...)) {
  char letter = 'a';  // names the argument, and the alias set of a tensor that is written to
  const auto add = [&](const std::string& type, bool is_written) {
    schema.append(letter == 'a' ? "(" : ", ").append(type);
    if (is_written) schema.append("(").append(1, letter).append("!)");
    schema.append(" ").append(1, letter++);
  };
  (add(schema_type<Kept<Arguments>>(), std::is_same_v<Arguments, Tensor&>), ...);
  return schema.append(") -> ").append(schema_type<Results>());
}

#define FASTFORMER_OP(function)                                                                                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(fastformer_cpp, m) { m.def(fastformer::schema_of(#function, function).c_str()); } \
  STABLE_TORCH_LIBRARY_IMPL(fastformer_cpp, CPU, m) { m.impl(#function, fastformer::boxed<function>); }

}  // namespace fastformer
