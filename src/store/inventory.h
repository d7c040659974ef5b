// Which slices of one model are in a store, and which are on their way into it: what neighbours ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/sha256.h"

namespace linkcpp::store {

// One bit a slice, in the manifest's order: slice i is bit i % 8 of byte i / 8.
class SliceBits {
  public:
    SliceBits() = default;
    explicit SliceBits(std::size_t n) : bytes_((n + 7) / 8) {}
    explicit SliceBits(std::vector<std::uint8_t> bytes) : bytes_(std::move(bytes)) {}

    // What lies beyond the end is not set.
    bool get(std::size_t i) const { return i / 8 < bytes_.size() && (bytes_[i / 8] >> i % 8 & 1) != 0; }
    void set(std::size_t i, bool value) {
        if (i / 8 >= bytes_.size()) { return; }
        const auto bit = static_cast<std::uint8_t>(1u << i % 8);
        bytes_[i / 8] = static_cast<std::uint8_t>(value ? bytes_[i / 8] | bit : bytes_[i / 8] & ~bit);
    }
    const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  private:
    std::vector<std::uint8_t> bytes_;
};

// Thread-safe.
class Inventory {
  public:
    Inventory(const Digest& model_id, std::size_t n_slices) : model_id_(model_id), here_(n_slices), coming_(n_slices) {}

    const Digest& model_id() const { return model_id_; }
    void set_here(std::size_t slice) {
        const std::lock_guard lock(mutex_);
        here_.set(slice, true);
        coming_.set(slice, false);
    }
    void set_coming(std::size_t slice, bool value) {
        const std::lock_guard lock(mutex_);
        coming_.set(slice, value);
    }
    struct Bits {
        SliceBits here;
        SliceBits coming;
    };
    Bits bits() const {
        const std::lock_guard lock(mutex_);
        return {here_, coming_};
    }

  private:
    Digest model_id_;
    mutable std::mutex mutex_;  // guards the two below
    SliceBits here_;
    SliceBits coming_;
};

}  // namespace linkcpp::store
