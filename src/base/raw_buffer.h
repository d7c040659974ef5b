// A buffer that grows without initialising what it grows by, and moves bytes with memcpy: for data that is written once
// and read once, where every further pass over memory counts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace linkcpp {

template <class T>
    requires std::is_trivially_copyable_v<T>
class RawBuffer {
  public:
    RawBuffer() = default;
    RawBuffer(RawBuffer&& other) noexcept
        : data_(std::move(other.data_)),
          size_(std::exchange(other.size_, 0)),
          capacity_(std::exchange(other.capacity_, 0)) {}
    RawBuffer& operator=(RawBuffer&& other) noexcept {
        data_ = std::move(other.data_);
        size_ = std::exchange(other.size_, 0);
        capacity_ = std::exchange(other.capacity_, 0);
        return *this;
    }

    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    std::size_t size() const { return size_; }
    std::size_t capacity() const { return capacity_; }
    bool empty() const { return size_ == 0; }
    T* begin() { return data(); }
    T* end() { return data() + size_; }
    const T* begin() const { return data(); }
    const T* end() const { return data() + size_; }

    // Keeps what fits; what is new has no value yet.
    void resize(std::size_t n) {
        if (n > capacity_) {
            const std::size_t capacity = std::max(n, capacity_ + capacity_ / 2);
            auto larger = std::make_unique_for_overwrite<T[]>(capacity);
            if (size_ > 0) { std::memcpy(larger.get(), data(), size_ * sizeof(T)); }
            data_ = std::move(larger);
            capacity_ = capacity;
        }
        size_ = n;
    }
    void append(std::span<const T> more) {
        if (more.empty()) { return; }
        const std::size_t before = size_;
        resize(before + more.size());
        std::memcpy(data() + before, more.data(), more.size_bytes());
    }
    void drop_front(std::size_t n) {
        if (n < size_) { std::memmove(data(), data() + n, (size_ - n) * sizeof(T)); }
        size_ -= std::min(n, size_);
    }
    void clear() { size_ = 0; }
    void release() {
        data_.reset();
        size_ = capacity_ = 0;
    }

  private:
    std::unique_ptr<T[]> data_;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

using RawBytes = RawBuffer<std::byte>;
using RawFloats = RawBuffer<float>;

}  // namespace linkcpp
