// For tests: a folder of the test's own, removed again with all that is in it. Tests run beside each other, each in a
// process of its own: a file with a fixed name in a shared folder would be several tests' at once.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "base/bytes.h"

namespace linkcpp {

class TestFolder {
  public:
    TestFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "linkcpp-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) { std::abort(); }
        path_ = name;
    }
    ~TestFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TestFolder(const TestFolder&) = delete;
    TestFolder& operator=(const TestFolder&) = delete;

    std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
    const std::filesystem::path& path() const { return path_; }
    std::filesystem::path write(std::string_view name, ByteView bytes) const {
        std::ofstream(path_ / name, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
        return path_ / name;
    }

  private:
    std::filesystem::path path_;
};

}  // namespace linkcpp
